#!/usr/bin/env bash
# Compiles this package's CUDA kernels for sm_90, so that a GPU machine need not:
#   bash tools/gpu/build_kernels.sh [FOLDER]     (runs/gpu/carry)
# makes FOLDER/kernels: the library, packed, and a digest of its sources; run.sh builds
# it anew where the digest is not that of its own. Needs nvcc, or the package
# nvidia-cuda-nvcc, g++, setuptools and PyTorch, of which a CPU's will do: the library
# keeps to PyTorch's stable ABI. 2 to 3 minutes on one core.
#   PYTHON=.venv/bin/python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-runs/gpu/carry}/kernels
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Of the sources as they are now: a change while they compile shows.
sources=$(bash tools/gpu/digest.sh csrc setup.py)
KVPOLICY_CUDA=1 KVPOLICY_CUDA_ARCHITECTURES=90 "$python" setup.py -q build_ext \
  --build-lib "$work" --build-temp "$work/objects"
rm -rf "$out"
mkdir -p "$out"
tar -C "$work" -cf - vllm_kvpolicy/_C.abi3.so | xz -9e >"$out/kernels.tar.xz"
echo "$sources" >"$out/sources"
ls -l "$out"
