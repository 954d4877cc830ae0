"""Moving tokens, against a dictionary of slots, in chunks of a few tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvpolicy.kernels import compact_pages
from vllm_kvpolicy.kernels.compact_pages import compact_pages_ref

CASES = settings(max_examples=150, deadline=None, derandomize=True)
HEAD_DIM = 3
CHUNKS = (1, 2, 3, 7)


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
    numbers = rng.sample(range(1, num_pages), sum(sizes))
    before = [[numbers.pop() for _ in range(size)] for size in sizes]
    counts = [rng.randint(0, len(row) * block_size) for row in before]
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


def check_moves(
    pages: torch.Tensor,
    rows: list[list[tuple[int, int, bool]]],
    give_in_place: bool = True,
) -> None:
    """Move each head's tokens, and compare every slot with what a dictionary says."""
    block_size = pages.shape[1]
    moves = list(chain(*rows))
    first = torch.tensor(list(accumulate(map(len, rows), initial=0)))
    slots = {slot: token.tolist() for slot, token in enumerate(pages.flatten(0, 1))}
    slots |= {dest: slots[source] for source, dest, _ in moves}
    source, dest = (torch.tensor([m[part] for m in moves]).long() for part in (0, 1))
    in_place = torch.tensor([stays for *_, stays in moves]).bool()
    compact_pages_ref(pages, source, dest, first, in_place if give_in_place else None)
    found = pages.reshape(-1, HEAD_DIM).tolist()
    assert found == list(slots.values()), (rows, block_size)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@given(case=layouts())
@CASES
def test_tokens_arrive_and_nothing_else_changes(
    chunk: int, columns: bool, case: tuple[int, int, list[Head]]
) -> None:
    block_size, num_pages, heads = case
    moves = [list(head.moves(block_size)) for head in heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_pages, "CHUNK_TOKENS", chunk)
        check_moves(make_pages(num_pages, block_size, columns), moves)


@pytest.mark.parametrize("chunk", CHUNKS)
@given(case=layouts(), holes=st.integers(0, 5))
@CASES
def test_survivors_that_do_not_exist_change_nothing(
    chunk: int, case: tuple[int, int, list[Head]], holes: int
) -> None:
    block_size, num_pages, heads = case
    nobody = [(0, 0, bool(number % 2)) for number in range(holes)]
    moves = []
    for head in heads:
        moves += [list(head.moves(block_size)), nobody]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_pages, "CHUNK_TOKENS", chunk)
        check_moves(make_pages(num_pages, block_size, False), moves)


@pytest.mark.parametrize("chunk", CHUNKS)
@given(case=layouts())
@CASES
def test_without_a_mask_every_page_stays(
    chunk: int, case: tuple[int, int, list[Head]]
) -> None:
    block_size, num_pages, heads = case
    heads = [Head(head.before, head.before, head.kept) for head in heads]
    moves = [list(head.moves(block_size)) for head in heads]
    assert all(stays for row in moves for *_, stays in row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compact_pages, "CHUNK_TOKENS", chunk)
        check_moves(make_pages(num_pages, block_size, True), moves, False)


def test_two_heads_swap_their_pages() -> None:
    pages = make_pages(3, 2, False)
    swap = [Head([1], [2], [0, 1]), Head([2], [1], [0, 1])]
    check_moves(pages, [list(head.moves(2)) for head in swap])


def test_pages_view_the_cache() -> None:
    """What is moved is the storage itself, whatever its strides."""
    storage = torch.arange(24.0).view(2, 3, 4)
    keys = storage.transpose(-1, -2)
    compact_pages_ref(keys, torch.tensor([7]), torch.tensor([0]), torch.tensor([0, 1]))
    assert storage[0, :, 0].tolist() == storage[1, :, 3].tolist() == [15, 19, 23]
