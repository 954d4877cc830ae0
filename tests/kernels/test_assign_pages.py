"""Pages to heads: against dealing them out of a list, and what must always hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpolicy.kernels.assign_pages import PageLists, assign_pages

CASES = settings(max_examples=120, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Event:
    """One request: pages of each head before, pages afterwards, pages of each then."""

    held: list[list[int]]
    arena: list[int]
    quota: list[int]
    rng: Random

    @property
    def usable(self) -> list[int]:
        """Whole rows of n pages, no more than the quota needs."""
        num_heads = len(self.quota)
        return self.arena[: -(-sum(self.quota) // num_heads) * num_heads]


@st.composite
def batches(draw: st.DrawFn) -> list[Event]:
    """1 to 3 events of equal shape; nobody has a page of another."""
    rng = draw(st.randoms(use_true_random=True))
    num_heads, num_rows = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    num_events, num_others = draw(st.integers(1, 3)), draw(st.integers(0, 12))
    num_cells = num_rows * num_heads
    size = num_cells + num_others
    numbers = rng.sample(range(1, 1000), size * num_events)
    batch = []
    for first in range(0, len(numbers), size):
        arena = numbers[first : first + num_cells]
        held: list[list[int]] = [[] for _ in range(num_heads)]
        for page in rng.sample(numbers[first : first + size], rng.randint(0, size)):
            rng.choice(held).append(page)
        total = rng.choice((num_cells, rng.randint(0, num_cells)))
        cuts = sorted(rng.randint(0, total) for _ in range(num_heads - 1))
        ends = zip([0, *cuts], [*cuts, total], strict=True)
        batch.append(Event(held, arena, [end - start for start, end in ends], rng))
    return batch


def assign(batch: list[Event]) -> PageLists:
    """Call the kernel as the ragged tier does, with pages of the arena as padding."""
    held, cells = [], []
    width = max(len(row) for event in batch for row in event.held) + 1
    for event in batch:
        place = {page: cell for cell, page in enumerate(event.arena)}
        rows = [
            row + event.rng.choices(event.arena, k=width - len(row))
            for row in event.held
        ]
        held.append(rows)
        cells.append([[place.get(page, -1) for page in row] for row in rows])
    return assign_pages(
        torch.tensor(held),
        torch.tensor([[len(row) for row in event.held] for event in batch]),
        torch.tensor(cells),
        torch.tensor([event.arena for event in batch]),
        torch.tensor([event.quota for event in batch]),
    )


def deal(event: Event) -> list[list[int]]:
    """Give each head its own pages first, then what nobody keeps."""
    usable = set(event.usable)
    lists = [
        [page for page in row if page in usable][:quota]
        for row, quota in zip(event.held, event.quota, strict=True)
    ]
    kept = {page for pages in lists for page in pages}
    spare: Iterator[int] = (page for page in event.usable if page not in kept)
    for pages, quota in zip(lists, event.quota, strict=True):
        pages += [next(spare) for _ in range(quota - len(pages))]
    return lists


def split(lists: PageLists, row: int) -> list[list[int]]:
    """Return the pages of each head."""
    first, pages = lists.first[row].tolist(), lists.pages[row].tolist()
    return [pages[a:b] for a, b in zip(first, first[1:], strict=False)]


@CASES
@given(batches())
def test_equals_dealing(batch: list[Event]) -> None:
    lists = assign(batch)
    for row, event in enumerate(batch):
        assert split(lists, row) == deal(event)
        assert not lists.pages[row, sum(event.quota) :].any()


@CASES
@given(batches())
def test_every_head_has_its_quota_and_nobody_shares(batch: list[Event]) -> None:
    lists = assign(batch)
    for row, event in enumerate(batch):
        found = split(lists, row)
        assert [len(pages) for pages in found] == event.quota
        taken = [page for pages in found for page in pages]
        assert len(set(taken)) == len(taken) and set(taken) <= set(event.usable)
        for own, pages, quota in zip(event.held, found, event.quota, strict=True):
            could_stay = [page for page in own if page in event.usable]
            assert pages[: len(could_stay)] == could_stay[:quota]


@CASES
@given(batches())
def test_unmoved_is_the_same_place_in_the_same_list(batch: list[Event]) -> None:
    lists = assign(batch)
    assert lists.unmoved is not None
    for row, event in enumerate(batch):
        expected = [
            held[place : place + 1] == [page]
            for held, pages in zip(event.held, split(lists, row), strict=True)
            for place, page in enumerate(pages)
        ]
        expected += [False] * (len(event.arena) - len(expected))
        assert lists.unmoved[row].tolist() == expected


@CASES
@given(batches())
def test_an_event_does_not_see_its_neighbours(batch: list[Event]) -> None:
    together = assign(batch)
    for row, event in enumerate(batch):
        alone = assign([event])
        for name in ("first", "pages", "unmoved"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0])


def test_by_hand() -> None:
    """Head 0 gives 13 away and keeps 10, 11; head 1 has only 12, which it keeps."""
    event = Event(
        held=[[10, 99, 11, 13], [12]],
        arena=[10, 12, 11, 13, 14, 15],
        quota=[2, 3],
        rng=Random(0),
    )
    lists = assign([event])
    assert lists.first.tolist() == [[0, 2, 5]]
    assert lists.pages.tolist() == [[10, 11, 12, 13, 14, 0]]
    assert lists.unmoved is not None
    assert lists.unmoved.tolist() == [[True, False, True, False, False, False]]
