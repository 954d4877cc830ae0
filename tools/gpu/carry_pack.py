#!/usr/bin/env python3
"""Packs a vLLM wheel for CUDA and a folder of dependencies into small archives.

Only machine code for sm_90 (Hopper) is kept in the CUDA libraries: in every fat binary
the entries for other chips are taken out and the room is zeroed, so that the file keeps
its size and its addresses but packs to a fraction. A container that has nothing for
sm_90 keeps one tiny entry of another chip, so that the driver still says "no kernel
image".
"""

import argparse
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import struct
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FAT_BINARY = 0xBA55ED50
MACHINE_CODE = 2
ARCHITECTURE = 90
# Left out of the wheel, below vllm/: needs torch >= 2.13, another chip, a compiler
# stack that is not there, or nothing that a dense model ever loads.
LEFT_OUT = (
    "third_party/deep_gemm/",  # its extension needs torch >= 2.13
    "third_party/fmha_sm100/",  # Blackwell
    "vllm-rs",  # the server in Rust, 59 MB
    "_qutlass_C.abi3.so",  # needs torch >= 2.13
    "_deepselect_C.abi3.so",  # sm_100 only
    "vllm_flash_attn/_vllm_fa2_C.abi3.so",  # sm_80 and PTX, 308 MB; sm_90 uses FA3
    "_flashmla_C.abi3.so",  # multi-head latent attention
    "_flashmla_extension_C.abi3.so",
    "_flashkda_C.abi3.so",
)
LIBRARIES = {  # CUDA libraries that travel, each in the archive of that name
    "vllm/_C_stable_libtorch.abi3.so": "c",
    "vllm/_moe_C_stable_libtorch.abi3.so": "moe",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "fa3",
}
Content = bytes | Path


class Entry(NamedTuple):
    """Code for one chip within a container."""

    offset: int
    kind: int
    size: int
    architecture: int


class Container(NamedTuple):
    """A fat binary: a header and entries."""

    offset: int
    header: int
    body: int
    entries: list[Entry]


class Member(NamedTuple):
    """A file of an archive."""

    name: str
    content: Content
    mode: int

    @property
    def size(self) -> int:
        """Bytes."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size


def section(data: bytes, name: str) -> tuple[int, int] | None:
    """Return offset and size of a section of an ELF file, None without it."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    each, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + index * each)
        for index in range(count)
    ]
    strings = headers[names][4]
    for header in headers:
        start = strings + header[0]
        if data[start : data.index(b"\0", start)] == name.encode():
            return header[4], header[5]
    return None


def containers(data: bytes, start: int, end: int) -> Iterator[Container]:
    """Yield the fat binaries of a section.

    Raises:
        ValueError: one is not laid out as expected.
    """
    place = start
    while place + 16 <= end:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, place)
        if magic != FAT_BINARY:
            place += 8
            continue
        at, entries = place + header, []
        while at < place + header + body:
            kind, _, entry_header, size = struct.unpack_from("<HHIQ", data, at)
            (architecture,) = struct.unpack_from("<I", data, at + 28)
            entries.append(Entry(at, kind, entry_header + size, architecture))
            at += entry_header + size
        if at != place + header + body:
            raise ValueError("a fat binary is not laid out as expected")
        yield Container(place, header, body, entries)
        place = at + (-at % 8)


def prune(data: bytes) -> tuple[bytes, dict[str, int]]:
    """Keep only ARCHITECTURE in a library.

    Returns:
        The library, as long as before, and what was kept.
    """
    found = section(data, ".nv_fatbin")
    if found is None:
        return data, {}
    start, size = found
    every = list(containers(data, start, start + size))
    foreign = [
        entry
        for container in every
        for entry in container.entries
        if entry.kind == MACHINE_CODE and entry.architecture // 10 != ARCHITECTURE // 10
    ]
    filler = min(foreign, key=lambda entry: entry.size, default=None)
    pruned = bytearray(data)
    facts = {"containers": len(every), "sm": 0, "none": 0, "kept": 0}
    for container in every:
        kind, keep = chosen(container, filler)
        body = b"".join(data[e.offset : e.offset + e.size] for e in keep)
        first = container.offset + container.header
        pruned[first : first + container.body] = body.ljust(container.body, b"\0")
        struct.pack_into("<Q", pruned, container.offset + 8, len(body))
        facts[kind] += 1
        facts["kept"] += len(body)
    return bytes(pruned), facts | {"was": size}


def chosen(container: Container, filler: Entry | None) -> tuple[str, list[Entry]]:
    """Return what stays of a container, and its kind: sm or none."""
    right = [
        each
        for each in container.entries
        if each.kind == MACHINE_CODE and each.architecture == ARCHITECTURE
    ]
    if right:
        return "sm", right
    if filler is not None and filler.size <= container.body:
        return "none", [filler]
    return "none", [min(container.entries, key=lambda entry: entry.size)]


def squeeze(job: tuple[str, list[Member], Path]) -> tuple[str, str]:
    """Write one archive; return its name and its SHA-256."""
    name, members, folder = job
    started = time.time()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in sorted(members, key=_by_kind):
            content = member.content
            data = content if isinstance(content, bytes) else content.read_bytes()
            info = tarfile.TarInfo(member.name)
            info.size, info.mode, info.mtime = len(data), member.mode, 1_700_000_000
            archive.addfile(info, io.BytesIO(data))
    raw = buffer.getbuffer()
    window = min(192 << 20, max(8 << 20, len(raw)))
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": window}]
    path = folder / f"{name}.tar.xz"
    with lzma.open(path, "wb", check=lzma.CHECK_CRC64, filters=filters) as file:
        file.write(raw)
    packed = path.read_bytes()
    sizes = f"{len(raw) / 1e6:.1f} -> {len(packed) / 1e6:.1f} MB"
    print(f"{name}: {sizes}, {time.time() - started:.0f} s", flush=True)
    return name, hashlib.sha256(packed).hexdigest()


def _by_kind(member: Member) -> tuple[str, str]:
    return os.path.splitext(member.name)[1], member.name


def archives(wheel: Path, deps: Path) -> tuple[dict[str, list[Member]], dict[str, Any]]:
    """Return the archives' files by name, and what was kept of each library."""
    groups: dict[str, list[Member]] = {"vllm": [], "deps": []}
    facts: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            left_out = any(name.startswith(f"vllm/{each}") for each in LEFT_OUT)
            if name.endswith("/") or left_out:
                continue
            data, group = file.read(name), LIBRARIES.get(name, "vllm")
            if name in LIBRARIES:
                data, facts[name] = prune(data)
                print("library", name, json.dumps(facts[name]), flush=True)
            mode = 0o755 if name.endswith(".so") else 0o644
            groups.setdefault(group, []).append(Member(name, data, mode))
    for path in sorted(deps.rglob("*")):
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
            mode = 0o755 if os.access(path, os.X_OK) else 0o644
            name = path.relative_to(deps).as_posix()
            groups["deps"].append(Member(name, path, mode))
    return groups, facts


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--deps", type=Path, required=True, help="pip's --target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    groups, facts = archives(args.wheel, args.deps)
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, members, args.out) for name, members in groups.items()]
    jobs.sort(key=lambda job: -sum(member.size for member in job[1]))
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        digests = dict(pool.map(squeeze, jobs, chunksize=1))
    build = hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()
    manifest = {"build": build[:16], "libraries": facts, "archives": digests}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
