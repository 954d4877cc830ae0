"""Random page lists of heads before and after an event, and what moving must do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random

import torch
from hypothesis import strategies as st

HEAD_DIM = 3
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Rows = list[list[tuple[int, int, bool]]]


@dataclass(frozen=True)
class Head:
    """Page lists of one head before and after, and the places in `before` it keeps."""

    before: list[int]
    after: list[int]
    kept: list[int]

    def moves(self, block_size: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (source slot, destination slot, page stays in its place)."""
        for place, kept in enumerate(self.kept):
            page, offset = self.before[kept // block_size], kept % block_size
            index = place // block_size
            stays = self.before[index : index + 1] == [self.after[index]]
            dest = self.after[index] * block_size + place % block_size
            yield page * block_size + offset, dest, stays


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, list[Head]]:
    """Tokens per page, pages, and heads; pages may change owner or place, or neither.

    Page 0 is nobody's.
    """
    rng = draw(st.randoms(use_true_random=True))
    block_size, num_heads = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    sizes = [draw(st.integers(0, 5)) for _ in range(num_heads)]
    num_pages = sum(sizes) + draw(st.integers(1, 4))
    loyalty = draw(st.sampled_from((0.0, 0.5, 0.9, 1.0)))
    return random_layout(rng, block_size, sizes, num_pages, loyalty)


def random_layout(
    rng: Random,
    block_size: int,
    sizes: list[int],
    num_pages: int,
    loyalty: float,
    least: float = 0,
) -> tuple[int, int, list[Head]]:
    """Return tokens per page, pages, and heads.

    Args:
        sizes: pages of each head before.
        num_pages: P, at least one more than the heads have.
        loyalty: the share of pages that keep owner and place.
        least: the least share of tokens that a head keeps.
    """
    numbers = rng.sample(range(1, num_pages), sum(sizes))
    before = [[numbers.pop() for _ in range(size)] for size in sizes]
    held = [len(row) * block_size for row in before]
    counts = [rng.randint(int(least * size), size) for size in held]
    after = _rehoused(rng, before, num_pages, loyalty, counts, block_size)
    heads = []
    for own, new, count in zip(before, after, counts, strict=True):
        kept = sorted(rng.sample(range(len(own) * block_size), count))
        heads.append(Head(own, new, kept))
    return block_size, num_pages, heads


def _rehoused(
    rng: Random,
    before: list[list[int]],
    num_pages: int,
    loyalty: float,
    counts: list[int],
    block_size: int,
) -> list[list[int]]:
    """Give each head as many pages as its tokens fill, some of them its own."""
    sizes = [-(-count // block_size) for count in counts]
    after = [
        [page if rng.random() < loyalty else 0 for page in row[:size]]
        for row, size in zip(before, sizes, strict=True)
    ]
    taken = {page for row in after for page in row}
    spare = [page for page in range(1, num_pages) if page not in taken]
    rng.shuffle(spare)
    return [[page or spare.pop() for page in row] for row in after]


def make_pages(num_pages: int, block_size: int, columns: bool) -> torch.Tensor:
    """Return pages [P, N, D] whose every number is different."""
    count = num_pages * block_size * HEAD_DIM
    numbers = torch.arange(count, dtype=torch.float32)
    if columns:
        return numbers.view(num_pages, HEAD_DIM, block_size).transpose(-1, -2)
    return numbers.view(num_pages, block_size, HEAD_DIM)


def move_arguments(rows: Rows) -> tuple[torch.Tensor, ...]:
    """Return source_slots, dest_slots, first and in_place of compact_pages."""
    moves = list(chain(*rows))
    source, dest = (torch.tensor([m[part] for m in moves]).long() for part in (0, 1))
    first = torch.tensor(list(accumulate(map(len, rows), initial=0)))
    return source, dest, first, torch.tensor([stays for *_, stays in moves]).bool()


def check_moves(
    compact_pages: Callable[..., None],
    pages: torch.Tensor,
    rows: Rows,
    give_in_place: bool = True,
) -> None:
    """Move each head's tokens, and compare every slot with what a dictionary says.

    Args:
        pages: [P, N, D], mutated; their bits are compared.
        rows: the moves of each head, (source slot, destination slot, page stays).
        give_in_place: pass on which pages stay.
    """
    bits = pages.view(INTEGERS[pages.element_size()])
    slots = dict(enumerate(bits.flatten(0, 1).tolist()))
    slots |= {dest: slots[source] for source, dest, _ in chain(*rows)}
    *arguments, in_place = move_arguments(rows)
    compact_pages(pages, *arguments, in_place if give_in_place else None)
    assert bits.flatten(0, 1).tolist() == list(slots.values()), (rows, pages.shape)
