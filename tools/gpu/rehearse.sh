#!/usr/bin/env bash
# Tries on a machine without a GPU what run.sh would do on one with it:
#   bash tools/gpu/rehearse.sh [PART...]     (all parts)
# Packs the checkout and counts the bytes that travel (pack_checkout.sh), unpacks it
# elsewhere, and there has run.sh run every part with MODEL=tiny: a file that does not
# travel, a wrong argument, a table that fails show here. Status 1 if one does.
#   PYTHON=.venv/bin/python   has vLLM for CPUs
#   CARRY=runs/gpu/carry      its kernels are installed; vLLM for CUDA is not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$(realpath -s "$(dirname "${PYTHON:-.venv/bin/python}")")
carry=$(realpath -m "${CARRY:-runs/gpu/carry}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# != 0 ] || set -- check contest serving decode events kernels
fits=0
bash tools/gpu/pack_checkout.sh "$work/checkout.tar.xz" || fits=1
mkdir -p "$work/there/carry"
tar -C "$work/there" -xf "$work/checkout.tar.xz"
[ ! -d "$carry/kernels" ] || cp -r "$carry/kernels" "$work/there/carry/"
cd "$work/there"
PATH=$bin:$PATH PYTHONPATH='' MODEL=tiny OUT=$work/out CARRY=$work/there/carry \
  bash tools/gpu/run.sh "$@" || fits=1
exit $fits
