"""The stages of an event in Triton equal their references, number for number.

Operations run in Triton here (see conftest.py). Fresh memory is poisoned.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_kvpolicy.kernels.assign_pages import assign_pages, assign_pages_ref
from vllm_kvpolicy.kernels.compact_pages import (
    list_survivors,
    list_survivors_ref,
    survivor_moves,
    survivor_moves_ref,
)
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.head_page_tables import (
    enter_page_lists,
    enter_page_lists_ref,
)
from vllm_kvpolicy.kernels.page_quota import page_quota, page_quota_ref
from vllm_kvpolicy.kernels.page_tables import enter_requests, enter_requests_ref
from vllm_kvpolicy.kernels.survivor_values import read_survivors, write_survivors

SEEDS = range(4)
EVENTS, LAYERS, HEADS, BLOCKS, PAGE = 3, 3, 2, 40, 4
NUM_HEADS, SLOTS, DEST, HELD = LAYERS * HEADS, 5, 4, 7
WIDTH = NUM_HEADS * PAGE
Draw = torch.Generator


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_page_quota(seed: int, block_size: int, fills: bool) -> None:
    by = draw(seed)
    tokens, floors = (integers(0, most, (5, 11), by) for most in (90, 4))
    caps = floors + integers(0, 7, (5, 11), by)
    total = torch.tensor([0, 1, 30, 60, 10_000])
    for most in (89, 2**20):
        given = tokens, floors, caps, total, block_size, most, fills
        assert torch.equal(page_quota(*given), page_quota_ref(*given))


def lists_of(seed: int, groups: int) -> tuple[Any, ...]:
    """Return arguments of assign_pages; nobody has a page of another."""
    by = draw(seed)
    dest = order(BLOCKS, (EVENTS, DEST), by)
    per_group = NUM_HEADS // groups
    num_pages = (LAYERS if groups == 1 else 1) * BLOCKS * HEADS
    shape = (groups, EVENTS, per_group, HELD)
    held = torch.stack([order(num_pages, shape[1:], by) for _ in range(groups)])
    held = held.transpose(0, 1).reshape(EVENTS, NUM_HEADS, HELD)
    num_held = integers(0, HELD + 1, (EVENTS, NUM_HEADS), by)
    share = torch.rand(EVENTS, groups, per_group, generator=by)
    most = per_group * DEST if groups > 1 else integers(1, 24, (EVENTS, 1, 1), by)
    quota = (share / share.sum(-1, keepdim=True) * most).long()
    if groups > 1:  # groups fill their part of the superblocks
        quota[..., -1] += most - quota.sum(-1)
    return held, num_held, dest, quota.flatten(1), BLOCKS, HEADS, groups


@pytest.mark.parametrize("groups", [1, LAYERS])
@pytest.mark.parametrize("seed", SEEDS)
def test_assign_pages(seed: int, groups: int) -> None:
    given = lists_of(seed, groups)
    got, want = assign_pages(*given), assign_pages_ref(*given)
    assert torch.equal(got.first, want.first)
    assert torch.equal(got.pages, want.pages)
    assert want.unmoved is not None and torch.equal(got.unmoved, want.unmoved)


@pytest.mark.parametrize("groups", [1, LAYERS])
@pytest.mark.parametrize("seed", SEEDS)
def test_lists_and_moves(seed: int, groups: int) -> None:
    """Heads without a survivor, and places without one, are among them."""
    given = lists_of(seed, groups)
    held, quota, by = given[0], given[3].clamp(max=HELD), draw(seed)
    first, num_tokens = first_of(quota), HELD * PAGE + 3
    score = torch.rand(EVENTS, NUM_HEADS, num_tokens, generator=by)
    survives = score.argsort(-1).argsort(-1) < (quota * PAGE)[..., None]
    places = NUM_HEADS * DEST * PAGE
    sources = list_survivors(survives, first, places, PAGE)
    assert torch.equal(sources, list_survivors_ref(survives, first, places, PAGE))
    strided = first[:1].expand(EVENTS, -1)
    same = survives[:1].expand(EVENTS, -1, -1)
    want = list_survivors_ref(same, strided, places, PAGE)
    assert torch.equal(list_survivors(same, strided, places, PAGE), want)
    pages = order(999, (EVENTS, NUM_HEADS * DEST), by)
    longer = torch.nn.functional.pad(held, (0, 1))  # the last page is not full
    for unmoved in (None, pages % 3 > 0):
        for begins in (first, strided):
            moves = sources, longer, begins, pages, unmoved, num_tokens, PAGE, groups
            made, wanted = survivor_moves(*moves), survivor_moves_ref(*moves)
            assert (made.in_place is None) == (unmoved is None)
            for name, value in vars(wanted).items():
                if value is not None:
                    assert torch.equal(getattr(made, name), value), name


def test_enter_requests_and_lists() -> None:
    by = draw(0)
    index, dest = order(SLOTS, (EVENTS,), by), order(BLOCKS, (EVENTS, DEST), by)
    tables = [integers(0, 9, shape, by).int() for shape in ((SLOTS, 9), (SLOTS,))]
    tables.append(tables[1] + 1)
    both(enter_requests, enter_requests_ref, tables, index, dest, dest[:, 0], last=True)
    quota = integers(0, 5, (EVENTS, NUM_HEADS), by)
    pages = order(99, (EVENTS, 30), by)
    tables = [integers(0, 9, (SLOTS, size), by).int() for size in (40, NUM_HEADS + 1)]
    lists = index, first_of(quota), pages
    got, want = both(enter_page_lists, enter_page_lists_ref, tables, *lists)
    assert torch.equal(got, want)


def both(
    operation: Operation, ref: Any, tables: list[Any], *given: Any, last: bool = False
) -> tuple[Any, Any]:
    """Run both on copies of the tables, which come first or last; compare these."""
    results, after = [], []
    for call in (operation, ref):
        mine = [table.clone() for table in tables]
        results.append(call(*given, *mine) if last else call(*mine, *given))
        after.append(mine)
    assert all(map(torch.equal, *after))
    assert not all(map(torch.equal, after[0], tables))
    return results[0], results[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_survivor_values(seed: int) -> None:
    """Of two values out of three; and heads of one length are a view."""
    by, num_tokens, most_local = draw(seed), HELD * PAGE + 2, 5
    survivors = torch.rand(3, BLOCKS, WIDTH, generator=by)
    local = torch.rand(3, SLOTS - 1, NUM_HEADS, most_local, generator=by)
    which, index = torch.tensor([2, 0]), order(SLOTS - 1, (EVENTS,), by)
    blocks = order(BLOCKS, (SLOTS, DEST), by).int()
    quota = integers(0, 4, (EVENTS, NUM_HEADS), by)
    read = survivors, local, which, index, first_of(quota).int(), blocks, num_tokens
    values = read_survivors(*read)
    assert torch.equal(values, read_survivors.reference(*read))
    sources = order(NUM_HEADS * num_tokens, (1, 2 * WIDTH), by).expand(EVENTS, -1)
    sources = sources.masked_fill(torch.arange(2 * WIDTH) > WIDTH + seed, -1)
    num_local = torch.tensor([0, 2, most_local])
    pages = integers(0, HELD, (EVENTS, NUM_HEADS), by)
    for num_pages in (pages, pages[:, :1].expand(-1, NUM_HEADS)):
        rest = which, index, values, sources, num_pages, num_local, blocks
        both(write_survivors, write_survivors.reference, [survivors, local], *rest)
