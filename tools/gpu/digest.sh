#!/usr/bin/env bash
# Prints a digest of files and of what folders hold: bash tools/gpu/digest.sh PATH...
set -euo pipefail
find "$@" -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum |
  cut -d' ' -f1
