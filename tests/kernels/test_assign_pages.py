"""Pages to heads: against dealing them out of a list."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweeps import trials
from vllm_kvpolicy.kernels.assign_pages import PageLists, assign_pages

CASES = settings(max_examples=trials(120), deadline=None, derandomize=True)


@dataclass(frozen=True)
class Event:
    """One request: pages of each head before, superblocks afterwards, pages then.

    The pool has `num_blocks` superblocks and `num_kv_heads` heads in each layer.
    """

    held: list[list[int]]
    dest: list[int]
    quota: list[int]
    num_blocks: int
    num_kv_heads: int
    rng: Random

    def own(self, block: int, head: int) -> int:
        """Return the id of a head's stock page of a superblock."""
        layer, kv_head = divmod(head, self.num_kv_heads)
        return (layer * self.num_blocks + block) * self.num_kv_heads + kv_head

    @property
    def arena(self) -> list[int]:
        """Pages that the request owns afterwards, superblock by superblock."""
        heads = range(len(self.quota))
        return [self.own(block, head) for block in self.dest for head in heads]

    @property
    def usable(self) -> list[int]:
        """Whole rows of n pages, no more than the quota needs."""
        num_heads = len(self.quota)
        return self.arena[: -(-sum(self.quota) // num_heads) * num_heads]


@st.composite
def batches(draw: st.DrawFn) -> list[Event]:
    """1 to 3 events of equal shape; nobody has a page of another."""
    rng = draw(st.randoms(use_true_random=True))
    num_layers, num_kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_events, num_dest = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_heads = num_layers * num_kv_heads
    num_mine = num_dest + draw(st.integers(0, 2))
    num_blocks = num_events * num_mine + 1
    blocks = rng.sample(range(num_blocks), num_events * num_mine)
    batch = []
    for first in range(0, len(blocks), num_mine):
        mine = blocks[first : first + num_mine]
        held: list[list[int]] = [[] for _ in range(num_heads)]
        num_cells = num_dest * num_heads
        total = rng.choice((num_cells, rng.randint(0, num_cells)))
        cuts = sorted(rng.randint(0, total) for _ in range(num_heads - 1))
        ends = zip([0, *cuts], [*cuts, total], strict=True)
        quota = [end - start for start, end in ends]
        sizes = num_blocks, num_kv_heads
        event = Event(held, mine[:num_dest], quota, *sizes, rng)
        pages = [event.own(block, head) for block in mine for head in range(num_heads)]
        for page in rng.sample(pages, rng.randint(0, len(pages))):
            rng.choice(held).append(page)
        batch.append(event)
    return batch


def arguments(batch: list[Event]) -> tuple[Any, ...]:
    """Return what the kernel takes, with pages of the arena as padding."""
    width = max(len(row) for event in batch for row in event.held) + 1
    held = [
        [row + event.rng.choices(event.arena, k=width - len(row)) for row in event.held]
        for event in batch
    ]
    return (
        torch.tensor(held),
        torch.tensor([[len(row) for row in event.held] for event in batch]),
        torch.tensor([event.dest for event in batch]),
        torch.tensor([event.quota for event in batch]),
        batch[0].num_blocks,
        batch[0].num_kv_heads,
    )


def assign(batch: list[Event]) -> PageLists:
    """Call the kernel as the ragged tier does."""
    return assign_pages(*arguments(batch))


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
    """Unmoved is what has the same place in the same list as before."""
    lists = assign(batch)
    assert lists.unmoved is not None
    for row, event in enumerate(batch):
        found = split(lists, row)
        assert found == deal(event)
        assert not lists.pages[row, sum(event.quota) :].any()
        expected = [
            held[place : place + 1] == [page]
            for held, pages in zip(event.held, found, strict=True)
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
