"""Selections, segments and quotas in C++."""

from collections.abc import Iterator

import pytest

from benchmarks.gpu.kernel_checks import poisoned
from support.twins_of_selection import *  # noqa: F403
from vllm_kvpolicy.kernels.dispatch import forced


@pytest.fixture(autouse=True)
def in_cpp() -> Iterator[None]:
    with forced("cpu"), poisoned():
        yield
