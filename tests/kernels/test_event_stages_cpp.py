"""The stages of an event in C++; what they refuse."""

import pytest
import torch

from support.twins_and_references import in_cpp  # noqa: F401
from support.twins_of_stages import *  # noqa: F403
from vllm_kvpolicy.kernels.compact_pages import (
    list_survivors,
    read_survivors,
    survivor_moves,
)
from vllm_kvpolicy.kernels.segment_quota import credited_mass
from vllm_kvpolicy.kernels.window_usage import pooled_usage

pytestmark = pytest.mark.usefixtures("in_cpp")


def test_pooling_of_what_is_no_number() -> None:
    usage = torch.rand(4, 1, 1, 60)
    usage[1, ..., 3], usage[2, ..., 59] = torch.nan, torch.nan
    usage[3, ..., 9] = torch.inf
    lengths = torch.full((4, 1, 1), 50)
    for window in (torch.full_like(lengths, 10), torch.zeros_like(lengths)):
        got = pooled_usage(usage, lengths, window)
        want = pooled_usage.reference(usage, lengths, window)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    rows = torch.rand(2, 9)
    with pytest.raises(RuntimeError, match="lengths: expected 2 contiguous entries"):
        credited_mass(rows, torch.full((3,), 9), None, 0.5, 0.5)
    every = torch.ones(1, 2, 8, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="first: expected 0 to 3 pages, got 4"):
        list_survivors(every, torch.tensor([[0, 2, 4]]), 12, 4)
    tables = torch.zeros(1, 3, 8), torch.zeros(1, 1, 2, 1)
    index = torch.zeros(1, dtype=torch.int64)
    blocks = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="first: expected 0 to 2 pages, got 4"):
        read_survivors(*tables, index, index, torch.tensor([[0, 2, 4]]), blocks, 9)
    held, pages = torch.zeros(1, 2, 2).long(), torch.zeros(1, 3).long()
    moves = held, torch.tensor([[0, 2, 3]]), pages, None, 8, 4
    with pytest.raises(RuntimeError, match="sources: expected tokens of held pages"):
        survivor_moves(torch.full((1, 12), 99), *moves)
