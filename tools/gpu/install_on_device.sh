#!/usr/bin/env bash
# On the GPU machine:  bash tools/gpu/install_on_device.sh [FOLDER]
# Unpacks what build_carry.sh packed (FOLDER, runs/gpu/carry/vllm) under SITE
# (runs/gpu/site). Afterwards:  . runs/gpu/site/env.sh
set -euo pipefail
mkdir -p "${SITE:-runs/gpu/site}"
SITE=$(cd "${SITE:-runs/gpu/site}" && pwd) \
  python3 - "${1:-runs/gpu/carry/vllm}" <<'PYTHON'
import concurrent.futures
import ctypes
import hashlib
import json
import lzma
import os
import sys
import tarfile
import time
from pathlib import Path

folder, site = Path(sys.argv[1]), Path(os.environ["SITE"])
started = time.time()
manifest = json.loads((folder / "manifest.json").read_text())


def unpack(name):
    """Unpack an archive, if it is what was packed."""
    path = folder / f"{name}.tar.xz"
    if hashlib.sha256(path.read_bytes()).hexdigest() != manifest["archives"][name]:
        raise SystemExit(f"damaged: {path.name}")
    with lzma.open(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
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


def driver_folder():
    """Return the folder of NVIDIA's driver libraries, where the loader finds them."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split()[-1]) for line in lines if "libcuda.so" in line]
    return paths[0].parent if paths else None


with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    list(pool.map(unpack, manifest["archives"]))
print(f"unpacked {sorted(manifest['archives'])} in {time.time() - started:.1f} s")
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
(site / "build").write_text(manifest["build"] + "\n")
PYTHON
