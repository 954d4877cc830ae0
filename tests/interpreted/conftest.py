"""Kernels in Triton on CPU tensors: only in a process where Triton interprets them.

Triton decides that when it is first imported, so these tests have a process of their
own; tests/kernels/test_under_the_interpreter.py starts it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced, poisoned
from support.interpreter import patch_once
from support.scattered_pages import Make

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]
if INTERPRETS:
    patch_once()


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    """Run operations in Triton, in all tests of this folder; fresh memory is poisoned.

    Floats are NaN, masks True and integers the highest number.
    """
    with forced("triton"), poisoned():
        yield


@pytest.fixture
def unbacked(tmp_path: Path) -> Iterator[Make]:
    """Make zeros that take up addresses alone until they are written.

    They are files with holes; the function takes a number of elements and a dtype.
    """
    paths: list[Path] = []

    def make(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        paths.append(tmp_path / str(len(paths)))
        return torch.from_file(
            str(paths[-1]), shared=True, size=num_elements, dtype=dtype
        )

    yield make
    for path in paths:
        path.unlink()
