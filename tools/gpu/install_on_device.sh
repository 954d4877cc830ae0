#!/usr/bin/env bash
# On the GPU machine, once per part:  bash runs/gpu/carry/part1/install_on_device.sh
# Unpacks a part under SITE (runs/gpu/site); parts may come in any order and in several
# commands. After the last one:  . runs/gpu/site/env.sh
set -euo pipefail
part=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
mkdir -p "${SITE:-runs/gpu/site}"
SITE=$(cd "${SITE:-runs/gpu/site}" && pwd) python3 - "$part" <<'PYTHON'
import concurrent.futures
import ctypes
import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import time
from pathlib import Path

part, site = Path(sys.argv[1]), Path(os.environ["SITE"])
started = time.time()
manifest = json.loads((part / "manifest.json").read_text())
state = site.with_name(site.name + ".state") / manifest["build"]
state.mkdir(parents=True, exist_ok=True)


def unpack(paths):
    """Unpack an archive from its pieces."""
    packed = io.BytesIO(b"".join(path.read_bytes() for path in paths))
    with lzma.open(packed) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            name = os.path.normpath(member.name)
            if name.startswith(("/", "..")) or not (member.isfile() or member.isdir()):
                raise SystemExit(f"unexpected member {member.name}")
            if member.isfile():
                target = site / name
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                with target.open("wb") as out:
                    while chunk := source.read(1 << 22):
                        out.write(chunk)
                target.chmod(member.mode)


def take(entry):
    """Unpack a whole archive, or keep a piece of one; return what is done."""
    path = part / entry["file"]
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise SystemExit(f"damaged: {path.name}")
    if entry["chunks"] == 1:
        unpack([path])
        return entry["archive"]
    (state / entry["file"]).write_bytes(data)
    return None


def driver_folder():
    """Return the folder of NVIDIA's driver libraries, where the loader finds them."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split()[-1]) for line in lines if "libcuda.so" in line]
    return paths[0].parent if paths else None


workers = min(8, os.cpu_count() or 1)
with concurrent.futures.ProcessPoolExecutor(workers) as pool:
    done = [name for name in pool.map(take, manifest["files"]) if name]
for name in {e["archive"] for e in manifest["files"] if e["chunks"] > 1}:
    count = next(e["chunks"] for e in manifest["files"] if e["archive"] == name)
    pieces = [state / f"{name}.tar.xz.{index:03d}" for index in range(count)]
    if all(piece.exists() for piece in pieces):
        unpack(pieces)
        done.append(name)
for name in done:
    (state / f"{name}.done").touch()
missing = [n for n in manifest["archives"] if not (state / f"{n}.done").exists()]
print(
    f"part {manifest['part']} of {manifest['parts']}: {sorted(done)} in "
    f"{time.time() - started:.1f} s,",
    f"still missing {missing}" if missing else "complete",
)
cache = site.parent / "cache"
lines = [f'export PYTHONPATH="{site}${{PYTHONPATH:+:$PYTHONPATH}}"']
if folder := driver_folder():
    lines.append(
        f'export LD_LIBRARY_PATH="{folder}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"'
    )
lines += f"""
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_USE_FLASHINFER_SAMPLER=${{VLLM_USE_FLASHINFER_SAMPLER:-0}}
export VLLM_USE_DEEP_GEMM=0
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
export VLLM_CACHE_ROOT="{cache}/vllm" TRITON_CACHE_DIR="{cache}/triton"
export TORCHINDUCTOR_CACHE_DIR="{cache}/inductor"
export VLLM_WORKER_MULTIPROC_METHOD=spawn PYTHONUNBUFFERED=1
""".split("\n")[1:-1]
(site / "env.sh").write_text("\n".join(lines) + "\n")
if not missing:
    (site / "build").write_text(manifest["build"] + "\n")
PYTHON
