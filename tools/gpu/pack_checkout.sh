#!/usr/bin/env bash
# Packs what a GPU machine needs of this checkout, and counts all bytes that travel:
#   bash tools/gpu/pack_checkout.sh [FILE]     (runs/gpu/checkout.tar.xz)
# takes the tracked files of tools/gpu/travels.txt as they are. Prints their bytes and
# those of CARRY; status 1 if both together are more than LIMIT_MIB, or if CARRY has
# kernels of other sources than this checkout. There:
#   mkdir w && tar -C w -xf checkout.tar.xz && cd w && CARRY=... bash tools/gpu/run.sh
# Where a whole working tree travels instead, the same list makes it smaller:
#   git sparse-checkout set --no-cone --stdin <tools/gpu/travels.txt
#   CARRY=runs/gpu/carry
#   LIMIT_MIB=45
set -euo pipefail
out=$(realpath -m "${1:-runs/gpu/checkout.tar.xz}")
carry=$(realpath -m "${CARRY:-runs/gpu/carry}")
limit=${LIMIT_MIB:-45}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$(dirname "$out")"
files=$(mktemp)
trap 'rm -f "$files"' EXIT
git ls-files -z --cached --ignored --exclude-from=tools/gpu/travels.txt >"$files"
tar --null -T "$files" --owner=0 --group=0 -cf - | xz "-${LEVEL:-6}" >"$out"

# Of a file or of all files in a folder; 0 where there is none.
bytes() {
  { [ ! -e "$1" ] || find "$1" -type f -printf '%s\n'; } |
    awk '{n += $1} END {print n + 0}'
}
say() { awk -v n="$1" -v what="$2" 'BEGIN {printf "%8.1f MiB  %s\n", n / 2^20, what}'; }

tree=$(xargs -0 stat -c %s <"$files" | awk '{n += $1} END {print n}')
packed=$(bytes "$out")
total=$((packed + $(bytes "$carry")))
say "$(git ls-files -z | xargs -0 stat -c %s | awk '{n += $1} END {print n}')" \
  "all tracked files"
say "$tree" "tracked files that travel, as they are"
say "$packed" "the same, packed: $out"
for each in "$carry"/*; do
  [ ! -e "$each" ] || say "$(bytes "$each")" "carried: $each"
done
say "$total" "travel in all, at most $limit MiB"
if [ -d "$carry/kernels" ] &&
  ! bash tools/gpu/digest.sh csrc setup.py | cmp -s - "$carry/kernels/sources"; then
  echo "the kernels in $carry were built from other sources than these:" \
    "run tools/gpu/build_kernels.sh"
  exit 1
fi
[ "$total" -le $((limit * 2 ** 20)) ]
