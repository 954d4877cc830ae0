"""The stages of an event in C++ equal their references, number for number.

Fresh memory is poisoned.
"""

from collections.abc import Iterator

import pytest
import torch

from support.stage_checks import (
    COUNTS,
    LAYERS,
    SEEDS,
    check_credited_mass,
    check_limit_must_keep,
    check_lists_and_moves,
    check_must_keep_tokens,
    check_pooled_usage,
    check_survivor_values,
)
from vllm_kvpolicy.kernels.compact_pages import list_survivors, survivor_moves
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.kernels.pooled_usage import SUFFIX_PADS, pooled_usage
from vllm_kvpolicy.kernels.segment_quota import credited_mass
from vllm_kvpolicy.kernels.survivor_values import read_survivors


@pytest.fixture(autouse=True)
def in_cpp() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    with forced("cpu"):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("groups", [1, LAYERS])
@pytest.mark.parametrize("seed", SEEDS)
def test_lists_and_moves(seed: int, groups: int) -> None:
    before = list_survivors.calls["cpu"], survivor_moves.calls["cpu"]
    check_lists_and_moves(seed, groups)
    after = list_survivors.calls["cpu"], survivor_moves.calls["cpu"]
    assert min(map(int.__sub__, after, before)) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_survivor_values(seed: int) -> None:
    check_survivor_values(seed)


@pytest.mark.parametrize("suffix", SUFFIX_PADS)
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("tokens", COUNTS)
def test_pooled_usage(tokens: int, kernel: int, suffix: str) -> None:
    check_pooled_usage(tokens, kernel, suffix)


def test_pooling_of_what_is_no_number() -> None:
    usage = torch.rand(4, 1, 1, 60)
    usage[1, ..., 3], usage[2, ..., 59] = torch.nan, torch.nan
    usage[3, ..., 9] = torch.inf
    lengths = torch.full((4, 1, 1), 50)
    for window in (torch.full_like(lengths, 10), torch.zeros_like(lengths)):
        got = pooled_usage(usage, lengths, window)
        want = pooled_usage.reference(usage, lengths, window)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_credited_mass(tokens: int, dtype: torch.dtype) -> None:
    check_credited_mass(tokens, dtype)


@pytest.mark.parametrize("tokens", COUNTS)
def test_must_keep(tokens: int) -> None:
    check_limit_must_keep(tokens)
    check_must_keep_tokens(tokens)


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
    moves = held, torch.tensor([[0, 2, 3]]), pages, None, 8, 4, 1
    with pytest.raises(RuntimeError, match="sources: expected tokens of held pages"):
        survivor_moves(torch.full((1, 12), 99), *moves)
