#!/usr/bin/env bash
# One command for a GPU machine without network, which has Python with torch for CUDA:
#   bash tools/gpu/run.sh PART...
# A PART is one of `python -m benchmarks.gpu --help`, such as `check` (make gpu-check)
# and `serving`. Before the first one, vLLM is unpacked from CARRY (runs/gpu/carry, see build_carry.sh) and this package is installed
# beside it, with the CUDA kernels of CARRY if they are of its sources and the GPU is an
# sm_90, or else with what nvcc makes. Both are kept, and done anew only where their
# sources changed, and so is what vLLM and Triton compile.
# PART:SECONDS gives a part a limit of its own. Each part leaves a JSON of its own.
# Status 1 if any part failed, or the kernels: parts run without those that do not build,
# or that CARRY has of other sources where there is no nvcc.
#   OUT=runs/gpu/out    results and log
#   SECONDS_EACH=500    limit of one part; the benchmark begins nothing 30 s before it
#   CHECK=              groups of checks, such as "syncs attention" (all)
#   MODEL=llama-3.1-8b  tiny: without a GPU, and figures mean nothing (rehearse.sh)
#   CARRY=runs/gpu/carry
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-runs/gpu/out}
carry=${CARRY:-runs/gpu/carry}
limit=${SECONDS_EACH:-500}
model=${MODEL:-llama-3.1-8b}
site=$PWD/runs/gpu/site
plugin=$PWD/runs/gpu/plugin
cache=$PWD/runs/gpu/cache
export VLLM_CACHE_ROOT=$cache/vllm TRITON_CACHE_DIR=$cache/triton
export TORCHINDUCTOR_CACHE_DIR=$cache/inductor
mkdir -p "$out" "$cache"
if [ $# = 0 ]; then
  echo "usage: bash tools/gpu/run.sh PART[:SECONDS]..." >&2
  exit 2
fi

install_vllm() {
  local manifest=$carry/vllm/manifest.json
  if [ ! -e "$manifest" ]; then
    python3 -c 'import vllm' && return # it is installed already
    echo "no vLLM, and none in $carry: tools/gpu/build_carry.sh makes it"
    return 1
  fi
  if [ ! -e "$site/build" ] || ! grep -qF "$(cat "$site/build")" "$manifest"; then
    SITE=$site bash tools/gpu/install_on_device.sh "$carry/vllm" || return 1
  fi
  # shellcheck disable=SC1091  # written by install_on_device.sh
  . "$site/env.sh"
}

# The package is built anew unless all that was built from is as it was; after a failure
# nothing says so, and the next call tries again.
install_plugin() {
  local kernels built_from
  choose_kernels
  built_from="$(bash tools/gpu/digest.sh vllm_kvpolicy csrc setup.py pyproject.toml)
kernels: $kernels"
  [ "$kernels" != carried ] ||
    built_from+=" $(bash tools/gpu/digest.sh "$carry/kernels")"
  if [ "$(cat "$plugin/sources" 2>/dev/null)" != "$built_from" ]; then
    rm -rf "$plugin"
    build_plugin "$kernels" || return 1
    [ $failed = 1 ] || echo "$built_from" >"$plugin/sources"
  fi
  ls "$plugin"/vllm_kvpolicy/_C.*.so 2>/dev/null ||
    echo "without CUDA kernels of our own"
  # The installed package, which has the kernels, comes before that of the checkout.
  export PYTHONSAFEPATH=1
  export PYTHONPATH=$plugin${PYTHONPATH:+:$PYTHONPATH}:$PWD
}

# Sets `kernels` to carried, nvcc or none; `failed` where carried ones are of no use and
# there is no nvcc.
choose_kernels() {
  local carried=$carry/kernels why
  kernels=carried
  if [ ! -e "$carried/sources" ]; then
    why="no kernels in $carried"
  elif ! bash tools/gpu/digest.sh csrc setup.py | cmp -s - "$carried/sources"; then
    why="the kernels in $carried were built from other sources"
  elif [ "$model" != tiny ] && ! is_sm_90; then
    why="the kernels in $carried are for sm_90, which this GPU is not"
  else
    return
  fi
  if command -v nvcc >/dev/null; then
    kernels=nvcc
    echo "$why: those that nvcc makes are taken"
    return
  fi
  kernels=none
  echo "$why, and there is no nvcc"
  [ ! -e "$carried" ] || failed=1
}

is_sm_90() {
  [ "$(python3 -c 'import torch; print(torch.cuda.get_device_capability())')" = "(9, 0)" ]
}

build_plugin() {
  case $1 in
  carried) pip_install 0 && python3 -m tarfile -e "$carry/kernels/kernels.tar.xz" "$plugin" ;;
  none) pip_install 0 ;;
  nvcc)
    pip_install 1 && return
    echo "the CUDA kernels do not build: going on without them"
    failed=1
    pip_install 0
    ;;
  esac
}

pip_install() {
  KVPOLICY_CPU=0 KVPOLICY_CUDA=$1 python3 -m pip install -q --no-index --no-deps \
    --no-build-isolation --target "$plugin" .
}

run_part() {
  local part=$1 limit=$2 words=()
  # shellcheck disable=SC2206  # several words
  [ "$part" != check ] || [ -z "${CHECK:-}" ] || words=(--only $CHECK)
  timeout "$limit" python3 -m benchmarks.gpu "$part" --model "$model" --out "$out" \
    --seconds $((limit - 30)) "${words[@]}"
}

run_all() {
  local word part status
  failed=0
  install_vllm && install_plugin || return 1
  for word in "$@"; do
    part=${word%%:*}
    [ "$part" = "$word" ] && word=$part:$limit
    # What earlier calls measured is not measured again; checks begin anew.
    [ "$part" = check ] || cp -n benchmarks/results/gpu/gpu-"$part"*.json "$out"/ 2>/dev/null
    echo "== $part"
    run_part "$part" "${word#*:}"
    status=$?
    echo "== $part: status $status, $SECONDS s since the start"
    [ $status = 0 ] || failed=1
  done
  return $failed
}

run_all "$@" 2>&1 | tee "$out/log"
