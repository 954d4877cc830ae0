"""Page lists per head: expanding them over a batch, against loops."""

from random import Random

import pytest
import torch

from vllm_kvpolicy.attention.head_tables import HeadTables

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
    skip = [rng.randint(0, 8) for _ in rows]
    expected = [
        [
            lists[slot][head] + [int(OWN[head]) + STRIDE * b for b in row[first:]]
            for head in range(NUM_HEADS)
        ]
        for slot, row, first in zip(rows, blocks, skip, strict=True)
    ]
    width = max(len(pages) for heads in expected for pages in heads) + 2
    found = tables.expand(
        torch.tensor(rows), torch.tensor(blocks).int(), torch.tensor(skip).int(), width
    )
    assert found.shape == (len(rows), NUM_HEADS, width) and found.dtype == torch.int32
    for row, heads in enumerate(expected):
        for head, pages in enumerate(heads):
            assert found[row, head, : len(pages)].tolist() == pages
    assert int(found.min()) >= 0 and int(found.max()) < 600, "padding is a valid id"
    counts = tables.counts(torch.tensor(rows))
    assert counts.tolist() == [[len(p) for p in lists[slot]] for slot in rows]
    for slot in lists:
        assert tables.longest[slot] == max(map(len, lists[slot]))


@pytest.mark.parametrize("seed", range(5))
def test_columns_beyond_the_width_are_cut_off(seed: int) -> None:
    rng = Random(seed)
    tables = make_tables()
    lists = {1: random_lists(rng)}
    update(tables, lists)
    blocks, skip = torch.arange(1, 10)[None], torch.tensor([2])
    whole = tables.expand(torch.tensor([1]), blocks, skip, 16)
    for width in (1, 3, 8):
        part = tables.expand(torch.tensor([1]), blocks, skip, width)
        assert torch.equal(part, whole[..., :width])


def test_clear_empties_only_the_slots_that_it_names() -> None:
    rng = Random(3)
    tables = make_tables()
    lists = {slot: random_lists(rng) for slot in range(SLOTS)}
    update(tables, lists)
    tables.clear([0, 2], torch.tensor([0, 2]))
    counts = tables.counts(torch.arange(SLOTS + 1)).sum(-1).tolist()
    assert counts == [0, sum(map(len, lists[1])), 0, 0]
    assert tables.longest.tolist() == [0, max(map(len, lists[1])), 0, 0]


def test_memory_is_what_was_announced() -> None:
    tables = make_tables()
    announced = HeadTables.nbytes(SLOTS + 1, MOST_BLOCKS, NUM_HEADS)
    assert tables.pages.nbytes + tables.first.nbytes == announced
