"""Selections, segments and quotas in C++, and shares of more kinds."""

from collections.abc import Iterator

import pytest
import torch

from support.twins_of_selection import *  # noqa: F403
from support.twins_of_selection import check
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.kernels.segment_quota import segment_quota


@pytest.fixture(autouse=True)
def in_cpp() -> Iterator[None]:
    with forced("cpu"):
        yield


@pytest.mark.parametrize("floor", [0, 1, 2, 3, 12])
def test_shares_of_blocks(floor: int) -> None:
    """Shares that round to halves, no mass, equal masses, floors beyond the budget."""
    parts = torch.tensor(
        [[1, 3, 1, 3], [1, 3, 5, 7], [0, 0, 0, 0], [9, 0, 0, 1], [4, 4, 4, 4]]
    )
    mass = torch.zeros(5, 4, 12, dtype=torch.int64)
    mass[..., 0] = parts * (2**28 // parts.sum(-1, keepdim=True).clamp(min=1))
    lengths = torch.full((5,), 48)
    exempt = torch.zeros(5, 48, dtype=torch.bool)
    for total in (0, 2, 3, 7, 20, 24, 26, 48):
        rows = mass.flatten(1), lengths, exempt, torch.full((5,), total)
        shape = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 12}
        found = check(segment_quota, *rows, **shape, min_quota=floor)
        assert (found.quotas.sum(-1) == total).all()
