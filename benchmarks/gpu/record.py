"""Owns the result of a part: one JSON file, written anew after every measurement.

A run that ended early goes on where it stopped: what the file holds is not measured
again.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance

ROOT = provenance.ROOT
SOURCES = ("vllm_kvpolicy", "csrc", "benchmarks/gpu")


class Record:
    """Measurements by name.

    Args:
        settings: what was asked for; measurements of other settings do not belong into
            the same file.

    Raises:
        ValueError: the file holds another part or other settings.
    """

    def __init__(self, path: Path, part: str, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "part": part,
            "settings": json.loads(json.dumps(settings)),
            "runs": [],
            "cells": {},
        }
        if path.exists():
            found = json.loads(path.read_text())
            for key in ("part", "settings"):
                if found[key] != self.content[key]:
                    raise ValueError(
                        f"{path.name}: holds {key} {found[key]}, expected "
                        f"{self.content[key]}: give another --out"
                    )
            self.content = found
        self.content["runs"].append(machine())

    @property
    def cells(self) -> dict[str, Any]:
        """Measurements by name."""
        return self.content["cells"]

    def add(self, name: str, cell: Any) -> None:
        """Keep a measurement; it says which run of the command it is from."""
        self.cells[name] = cell | {"run": len(self.content["runs"]) - 1}
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(self.content) + "\n")
        partial.replace(self.path)


def machine() -> dict[str, Any]:
    """Return what measurements are made with: machine, versions, command, sources."""
    found = provenance.collect("benchmarks.gpu")
    found["triton"] = provenance.package_version("triton")
    found["transformers"] = provenance.package_version("transformers")
    found["sources"] = source_digest()
    found["system"] = platform.release()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_multiprocessors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        found["gpu_driver"] = driver_version()
    return found


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, None where it does not say."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    numbers = [word for word in words if word.count(".") >= 1 and word[0].isdigit()]
    return numbers[0] if numbers else None


def source_digest() -> str:
    """Return a hash of the sources that were measured, where no commit says so."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cpp"):
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
