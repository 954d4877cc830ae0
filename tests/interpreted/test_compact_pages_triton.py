"""The twin that moves tokens, against a dictionary of slots, in tiles of a few tokens.

The interpreter runs programs, and what threads of one would do at once, one after the
other: it shows tiles in the wrong order and tokens that are overwritten before they are
read, but no race. tests/kernels/test_triton_compiles.py looks for the barrier.
"""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweeps import trials
from support.worker.page_moves import (
    INTEGERS,
    Head,
    check_moves,
    layouts,
    make_pages,
    move_arguments,
    random_layout,
)
from vllm_kvpolicy.kernels import compact_pages as shared
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.triton import compact_pages as twin

CASES = settings(max_examples=trials(40), deadline=None, derandomize=True)
TILES = (1, 2, 8)


def make_cache(
    num_pages: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a pool [P, N, 2D] of all bit patterns, NaNs included."""
    integer = INTEGERS[dtype.itemsize]
    shape = (num_pages, block_size, 2 * head_dim)
    generator = torch.Generator().manual_seed(num_pages)
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=integer)
    return bits.view(dtype)


@pytest.mark.parametrize("tile", TILES)
@given(case=layouts(), holes=st.integers(0, 5))
@CASES
def test_tokens_arrive_and_nothing_else_changes(
    tile: int, case: tuple[int, int, list[Head]], holes: int
) -> None:
    """Rows of survivors that do not exist lie between those of the heads."""
    block_size, num_pages, heads = case
    nobody = [(0, 0, bool(number % 2)) for number in range(holes)]
    moves = []
    for head in heads:
        moves += [list(head.moves(block_size)), nobody]
    calls = compact_pages.calls["triton"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "TILE_TOKENS", tile)
        check_moves(compact_pages, make_pages(num_pages, block_size, False), moves)
    assert compact_pages.calls["triton"] == calls + 1


@pytest.mark.parametrize("tile", TILES)
@given(case=layouts())
@CASES
def test_without_a_mask_every_page_stays(
    tile: int, case: tuple[int, int, list[Head]]
) -> None:
    block_size, num_pages, heads = case
    heads = [Head(head.before, head.before, head.kept) for head in heads]
    moves = [list(head.moves(block_size)) for head in heads]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "TILE_TOKENS", tile)
        pages = make_pages(num_pages, block_size, False)
        check_moves(compact_pages, pages, moves, give_in_place=False)


@pytest.mark.parametrize("half", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("loyalty", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.bfloat16, 128),
        (torch.float16, 33),
        (torch.float32, 5),
        (torch.float64, 20),
        (torch.uint8, 1),
    ],
)
def test_every_dtype_and_width_in_a_pool(
    dtype: torch.dtype, head_dim: int, loyalty: float, half: int
) -> None:
    """Rows longer than a tile of the real size, in one half of a pool's columns."""
    layout = random_layout(Random(head_dim), 16, [25, 3, 0, 12], 50, loyalty, 0.5)
    block_size, num_pages, heads = layout
    moves = [list(head.moves(block_size)) for head in heads]
    cache = make_cache(num_pages, block_size, head_dim, dtype)
    halves = cache.split(head_dim, dim=-1)
    other = halves[1 - half].view(INTEGERS[dtype.itemsize])
    before = other.clone()
    assert max(map(len, moves)) > twin.TILE_TOKENS
    check_moves(compact_pages, halves[half], moves, give_in_place=loyalty < 1)
    assert torch.equal(other, before), "the other half of the columns"


def test_slices_of_columns_give_what_one_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "SCRATCH_BYTES", 1)
    layout = random_layout(Random(1), 4, [9, 5, 7], 30, 0.6)
    block_size, num_pages, heads = layout
    moves = [list(head.moves(block_size)) for head in heads]
    pages = make_cache(num_pages, block_size, 64, torch.float16)[..., :64]
    check_moves(compact_pages, pages, moves)


def test_scratch_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that does not pass through scratch does not come out of it."""
    made = []
    new_empty = torch.Tensor.new_empty

    def poisoned(pages: torch.Tensor, *shape: int, **options) -> torch.Tensor:
        if options:  # the interpreter's own
            return new_empty(pages, *shape, **options)
        made.append(new_empty(pages, *shape).fill_(torch.nan))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    layout = random_layout(Random(2), 4, [9, 5, 7], 30, 0.6)
    block_size, num_pages, heads = layout
    moves = [list(head.moves(block_size)) for head in heads]
    check_moves(compact_pages, make_pages(num_pages, block_size, False), moves)
    assert [scratch.shape[0] for scratch in made] == [sum(map(len, moves))]
    assert made[0].isnan().any() and not made[0].isnan().all()


def test_a_row_does_not_depend_on_others() -> None:
    layout = random_layout(Random(3), 4, [40, 1, 30], 80, 1.0)
    block_size, num_pages, heads = layout
    rows = [list(head.moves(block_size)) for head in heads]
    together = make_pages(num_pages, block_size, False)
    alone = together.clone()
    *arguments, _ = move_arguments(rows)
    compact_pages(together, *arguments)
    for row in reversed(rows):
        *arguments, _ = move_arguments([row])
        compact_pages(alone, *arguments)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("rows", [[], [[]], [[], [], []]])
@pytest.mark.parametrize("give_in_place", [True, False])
def test_nothing_to_move(rows: list, give_in_place: bool) -> None:
    check_moves(compact_pages, make_pages(2, 4, False), rows, give_in_place)


def test_keys_in_columns_are_refused() -> None:
    slot = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="pages: expected contiguous channels"):
        compact_pages(make_pages(2, 4, True), slot, slot, torch.tensor([0, 1]))
