"""Page lists per head: expanding them over a batch, against loops."""

from random import Random

import numpy as np
import pytest
import torch

from vllm_kvpolicy.worker.tiers import head_tables
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables

CPU = torch.device("cpu")
SLOTS, MOST_BLOCKS, NUM_HEADS, STRIDE = 3, 4, 5, 2
# Two heads per layer, 100 superblocks: what PagePool.own_pages says of superblock 0.
OWN = torch.tensor([0, 1, 200, 201, 400])


def make_tables() -> HeadTables:
    return HeadTables(SLOTS, MOST_BLOCKS, OWN, STRIDE, CPU)


def random_lists(rng: Random) -> list[list[int]]:
    """Return pages per head: between none and most of what a request may have."""
    left = MOST_BLOCKS * NUM_HEADS
    lists: list[list[int]] = []
    for _ in range(NUM_HEADS):
        size = rng.randint(0, min(left, 7))
        lists.append([rng.randrange(600) for _ in range(size)])
        left -= size
    return lists


def update(tables: HeadTables, lists: dict[int, list[list[int]]]) -> None:
    """Enter the lists of some slots, with any id behind the last."""
    ends = [torch.tensor([0, *map(len, rows)]).cumsum(0) for rows in lists.values()]
    flat = [[page for row in rows for page in row] for rows in lists.values()]
    width = max(map(len, flat))
    pages = torch.tensor([row + [599] * (width - len(row)) for row in flat])
    slots = list(lists)
    tables.update(slots, torch.tensor(slots), torch.stack(ends), pages.long())


def expanded(
    tables: HeadTables,
    rows: list[int],
    blocks: list[list[int]],
    skip: list[int],
    width: int,
) -> torch.Tensor:
    """Return [R, n, width] of slots `rows`, each of whose `skip` is of its slot.

    Rows stand in a batch between others, which stay as they are.
    """
    num_rows = len(rows)
    found = torch.full((1, num_rows + 2, NUM_HEADS, width), -7, dtype=torch.int32)
    offsets = torch.full((1, num_rows + 2, NUM_HEADS), -7, dtype=torch.int32)
    which = torch.arange(num_rows).flip(0) + 1
    skips = torch.zeros(SLOTS + 1, dtype=torch.int32)
    skips[rows] = torch.tensor(skip, dtype=torch.int32)
    table = torch.tensor([[0] * len(blocks[0]), *blocks[::-1]], dtype=torch.int32)
    slots = torch.tensor(rows)
    tables.expand(found, offsets, which, slots, table, skips)
    assert (found[:, [0, -1]] == -7).all() and (offsets[:, [0, -1]] == -7).all()
    count = tables.first[rows].diff(dim=-1)
    assert torch.equal(offsets[0, which], count - torch.tensor(skip)[:, None])
    return found[0, which]


@pytest.mark.parametrize("seed", range(20))
def test_expand_puts_global_pages_in_front_of_local_ones(seed: int) -> None:
    rng = Random(seed)
    tables = make_tables()
    # Every slot is used twice: what was there before must not shine through.
    update(tables, {slot: random_lists(rng) for slot in range(SLOTS)})
    lists = {slot: random_lists(rng) for slot in (2, 0)}
    update(tables, lists)
    lists[SLOTS] = [[]] * NUM_HEADS  # nobody's slot
    rows = [2, SLOTS, 0, 2]
    blocks = [[rng.randrange(100) for _ in range(9)] for _ in rows]
    skip_of = [rng.randint(0, 8) for _ in range(SLOTS + 1)]
    skip = [skip_of[slot] for slot in rows]
    expected = [
        [
            lists[slot][head] + [int(OWN[head]) + STRIDE * b for b in row[first:]]
            for head in range(NUM_HEADS)
        ]
        for slot, row, first in zip(rows, blocks, skip, strict=True)
    ]
    width = max(len(pages) for heads in expected for pages in heads) + 2
    found = expanded(tables, rows, blocks, skip, width)
    for row, heads in enumerate(expected):
        for head, pages in enumerate(heads):
            assert found[row, head, : len(pages)].tolist() == pages
    assert int(found.min()) >= 0 and int(found.max()) < 600, "padding is a valid id"
    longest = [max(map(len, lists[slot])) for slot in lists]
    assert tables.longest(list(lists)).tolist() == longest


@pytest.mark.parametrize("seed", range(5))
def test_columns_beyond_the_width_are_cut_off(seed: int) -> None:
    rng = Random(seed)
    tables = make_tables()
    lists = {1: random_lists(rng)}
    update(tables, lists)
    blocks = [list(range(1, 10))]
    whole = expanded(tables, [1], blocks, [2], 16)
    for width in (1, 3, 8):
        part = expanded(tables, [1], blocks, [2], width)
        assert torch.equal(part, whole[..., :width])


def test_clear_empties_only_the_slots_that_it_names() -> None:
    rng = Random(3)
    tables = make_tables()
    lists = {slot: random_lists(rng) for slot in range(SLOTS)}
    update(tables, lists)
    assert tables.held(range(SLOTS)).all()
    tables.clear([0, 2], torch.tensor([0, 2]))
    held = [0, sum(map(len, lists[1])), 0, 0]
    assert tables.first[:, -1].tolist() == held
    assert tables.held(range(SLOTS + 1)).tolist() == held
    longest = [0, max(map(len, lists[1])), 0, 0]
    assert tables.longest(range(SLOTS + 1)).tolist() == longest


class Late:
    """Integers that arrive when they are asked for, or when told."""

    here = False

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def is_here(self) -> bool:
        return self.here

    def read(self) -> np.ndarray:
        return self.values.numpy()


def test_longest_lists_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes what is known otherwise until they are here; an event waits."""
    monkeypatch.setattr(head_tables, "HostCopy", Late)
    tables, rng = make_tables(), Random(1)
    lists = {slot: random_lists(rng) for slot in range(SLOTS)}
    longest = [max(map(len, rows)) for rows in lists.values()]
    update(tables, lists)
    slots, otherwise = np.array([1, 0, SLOTS, 1]), np.array([40, 41, 0, 40])
    assert tables.most(slots, otherwise).tolist() == [40, 41, 0, 40]
    assert tables.longest([1]).tolist() == [longest[1]]
    assert tables.most(slots, otherwise).tolist() == [longest[1], 41, 0, longest[1]]
    tables.clear([0], torch.tensor([0]))
    assert tables.most(slots, otherwise).tolist() == [longest[1], 0, 0, longest[1]]
    monkeypatch.setattr(Late, "here", True)
    assert tables.most(np.array([2]), np.array([9])).tolist() == [longest[2]]


def test_memory_is_what_was_announced() -> None:
    tables = make_tables()
    announced = HeadTables.nbytes(SLOTS + 1, MOST_BLOCKS, NUM_HEADS)
    assert tables.pages.nbytes + tables.first.nbytes == announced
