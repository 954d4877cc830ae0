"""Tests of the stages of an event, which twins in C++ and in Triton pass.

Files of tests import all of them and say which twins run. These equal their references,
number for number. Of the values of events nothing is real, only shapes.
"""

import math
from typing import Any

import pytest
import torch

from support.twins_and_references import check_call, check_tables
from vllm_kvpolicy.kernels.compact_pages import (
    list_survivors,
    read_survivors,
    survivor_moves,
    write_survivors,
)
from vllm_kvpolicy.kernels.ranking import limit_must_keep, must_keep_tokens
from vllm_kvpolicy.kernels.segment_quota import credited_mass
from vllm_kvpolicy.kernels.window_usage import pooled_usage

SEEDS = range(4)
EVENTS, LAYERS, HEADS, BLOCKS, PAGE = 3, 3, 2, 40, 4
NUM_HEADS, SLOTS, DEST, HELD = LAYERS * HEADS, 5, 4, 7
WIDTH = NUM_HEADS * PAGE
Draw = torch.Generator
COUNTS = (1, 40, 1100)  # of tokens


def draw(seed: int) -> Draw:
    return torch.Generator().manual_seed(seed)


def integers(low: int, high: int, shape: tuple[int, ...], by: Draw) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=by)


def order(count: int, shape: tuple[int, ...], by: Draw) -> torch.Tensor:
    """Return different numbers below `count`."""
    size = torch.Size(shape).numel()
    return torch.randperm(count, generator=by)[:size].view(shape)


def first_of(quota: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(quota.cumsum(-1), (1, 0))


def lists_of(seed: int) -> tuple[Any, ...]:
    """Return arguments of assign_pages; nobody has a page of another.

    The first event fills its superblocks.
    """
    by = draw(seed)
    dest = order(BLOCKS, (EVENTS, DEST), by)
    held = order(NUM_HEADS * BLOCKS, (EVENTS, NUM_HEADS, HELD), by)
    num_held = integers(0, HELD + 1, (EVENTS, NUM_HEADS), by)
    share = torch.rand(EVENTS, NUM_HEADS, generator=by)
    most = integers(1, NUM_HEADS * DEST, (EVENTS, 1), by)
    quota = (share / share.sum(-1, keepdim=True) * most).long()
    quota[0, -1] += NUM_HEADS * DEST - quota[0].sum()
    return held, num_held, dest, quota, BLOCKS, HEADS


@pytest.mark.parametrize("seed", SEEDS)
def test_lists_and_moves(seed: int) -> None:
    """Compare them; heads and places without a survivor are among them."""
    given = lists_of(seed)
    held, quota, by = given[0], given[3].clamp(max=HELD), draw(seed)
    first, num_tokens = first_of(quota), HELD * PAGE + 3
    score = torch.rand(EVENTS, NUM_HEADS, num_tokens, generator=by)
    survives = score.argsort(-1).argsort(-1) < (quota * PAGE)[..., None]
    places = NUM_HEADS * DEST * PAGE
    sources = check_call(list_survivors, survives, first, places, PAGE)
    strided = first[:1].expand(EVENTS, -1)
    same = survives[:1].expand(EVENTS, -1, -1)
    check_call(list_survivors, same, strided, places, PAGE)
    pages = order(999, (EVENTS, NUM_HEADS * DEST), by)
    longer = torch.nn.functional.pad(held, (0, 1))  # the last page is not full
    for unmoved in (None, pages % 3 > 0):
        for begins in (first, strided):
            moves = sources, longer, begins, pages, unmoved, num_tokens, PAGE
            made = check_call(survivor_moves, *moves)
            assert (made.in_place is None) == (unmoved is None)


@pytest.mark.parametrize("seed", SEEDS)
def test_survivor_values(seed: int) -> None:
    """Compare two values out of three; heads of one length are a view."""
    by, num_tokens, most_local = draw(seed), HELD * PAGE + 2, 5
    survivors = torch.rand(3, BLOCKS, WIDTH, generator=by)
    local = torch.rand(3, SLOTS - 1, NUM_HEADS, most_local, generator=by)
    which, index = torch.tensor([2, 0]), order(SLOTS - 1, (EVENTS,), by)
    blocks = order(BLOCKS, (SLOTS, DEST), by).int()
    quota = integers(0, 4, (EVENTS, NUM_HEADS), by)
    read = survivors, local, which, index, first_of(quota).int(), blocks, num_tokens
    values = check_call(read_survivors, *read)
    sources = order(NUM_HEADS * num_tokens, (1, 2 * WIDTH), by).expand(EVENTS, -1)
    sources = sources.masked_fill(torch.arange(2 * WIDTH) > WIDTH + seed, -1)
    num_local = torch.tensor([0, 2, most_local])
    pages = integers(0, HELD, (EVENTS, NUM_HEADS), by)
    for num_pages in (pages, pages[:, :1].expand(-1, NUM_HEADS)):
        rest = which, index, values, sources, num_pages, num_local, blocks
        check_tables(write_survivors, [survivors, local], *rest)


@pytest.mark.parametrize("suffix", ["max", "mean", "none"])
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("tokens", COUNTS)
def test_pooled_usage(tokens: int, kernel: int, suffix: str) -> None:
    """Compare to the last bit, but for a mean; rows may have no older tokens."""
    by = draw(tokens)
    usage = torch.rand(2, 3, 4, tokens, generator=by)
    lengths = integers(1, tokens + 1, (2, 3, 4), by)
    window = lengths.clamp(max=33)
    given = usage, lengths, window, kernel, suffix
    if suffix == "mean":
        got, want = pooled_usage(*given), pooled_usage.reference(*given)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    else:
        check_call(pooled_usage, *given)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_credited_mass(tokens: int, dtype: torch.dtype) -> None:
    """Compare to the last bit, because segments are cut where it crosses thresholds."""
    generator = draw(tokens)
    usage, credit = torch.rand(2, 6, tokens, generator=generator) ** 8
    usage[1], usage[2] = 0.0, -usage[2]
    usage[3, ::3], usage[4, ::5] = math.nan, math.inf
    lengths = integers(1, tokens + 1, (6,), generator)
    for old in (None, credit, credit.to(dtype), torch.zeros_like(credit)):
        check_call(credited_mass, usage.to(dtype), lengths, old, 0.7, 0.6)


@pytest.mark.parametrize("tokens", COUNTS)
def test_limit_of_must_keep(tokens: int) -> None:
    """Compare rows of sinks, of newest, of both and others, of all and nothing."""
    generator = draw(tokens)
    edge = integers(0, tokens + 1, (6, 2), generator)
    token = torch.arange(tokens)
    must = (token < edge[:, :1]) | (token >= tokens - edge[:, 1:])
    must[2:4] |= torch.rand(2, tokens, generator=generator) < 0.3
    must[4], must[5] = True, False
    for budget in (1, 3, tokens // 2 + 1, tokens, tokens + 9):
        check_call(limit_must_keep, must.view(2, 3, -1), budget)


@pytest.mark.parametrize("tokens", COUNTS)
def test_must_keep_tokens(tokens: int) -> None:
    """Compare heads of their own lengths, and of one length, which are a view."""
    pages = integers(0, tokens // 4 + 1, (3, 5), draw(tokens))
    local = torch.tensor([0, 3, tokens])
    sinks = torch.tensor([0, 4, 1])
    for num_pages in (pages, pages[:, :1].expand(-1, 5)):
        check_call(must_keep_tokens, num_pages, local, sinks, 4, tokens)
