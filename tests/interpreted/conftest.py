"""Kernels in Triton on CPU tensors: only in a process where Triton interprets them.

Triton decides that when it is first imported, so these tests have a process of their
own; tests/kernels/test_under_the_interpreter.py starts it.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_kvpolicy.kernels.dispatch import forced

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
# Worlds of events are those of the references' tests.
sys.path.append(str(Path(__file__).parents[1] / "attention"))
collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]


@pytest.fixture(autouse=True)
def in_triton() -> Iterator[None]:
    """Run operations in Triton, in all tests of this folder."""
    with forced("triton"):
        yield
