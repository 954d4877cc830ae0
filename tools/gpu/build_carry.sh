#!/usr/bin/env bash
# Packs vLLM for CUDA for a GPU machine without network:
#   bash tools/gpu/build_carry.sh [FOLDER]     (runs/gpu/carry)
# makes FOLDER/vllm, and keeps git from seeing it. Kernels of this package are compiled
# into FOLDER/kernels, where nvcc is found.
# About 350 MB come from the package index; 2-4 minutes on two cores, up to 2.5 GB of
# memory in each of two workers.
#   VLLM_VERSION=0.32.0  the release; its libraries are built for torch >= 2.11
#   EXTRA="pkg==1 ..."   more wheels to carry, without their dependencies
#   SERVER=0             1: carry what the OpenAI-compatible server needs, too, +4 MiB
#   JOBS=2               workers that compress
set -euo pipefail
out=${1:-runs/gpu/carry}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
version=${VLLM_VERSION:-0.32.0}
mkdir -p "$out"
if git -C "$out" rev-parse --is-inside-work-tree >/dev/null 2>&1 &&
  ! git -C "$out" check-ignore -q .; then
  exclude=$(git -C "$out" rev-parse --path-format=absolute --git-path info/exclude)
  mkdir -p "$(dirname "$exclude")"
  echo "/$(git -C "$out" rev-parse --show-prefix)" >>"$exclude"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tags=(--only-binary=:all: --python-version 3.12 --implementation cp)
for minor in $(seq 39 -1 5); do tags+=(--platform "manylinux_2_${minor}_x86_64"); done
for year in 2014 2010 1; do tags+=(--platform "manylinux${year}_x86_64"); done

echo "== vllm $version wheel"
"$python" -m pip download -q --no-deps "${tags[@]}" -d "$work/wheel" "vllm==$version"
echo "== dependencies"
needed=(-r "$here/carry_requirements.txt")
[ "${SERVER:-0}" = 0 ] || needed+=(-r "$here/carry_server_requirements.txt")
# shellcheck disable=SC2086  # EXTRA is a list of words
"$python" -m pip install -q --no-deps --no-compile "${tags[@]}" \
  --target "$work/deps" "${needed[@]}" ${EXTRA:-}
rm -rf "$work/deps/bin"

rm -rf "$out/vllm" "$out/kernels"
"$python" "$here/carry_pack.py" --wheel "$work"/wheel/vllm-*.whl --deps "$work/deps" \
  --out "$out/vllm" --jobs "${JOBS:-2}"
echo "== kernels"
bash "$here/build_kernels.sh" "$(realpath "$out")" ||
  echo "no kernels of this package are carried: the GPU machine builds them"
du -sm "$out"/*
