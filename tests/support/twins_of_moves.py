"""Tests of moving tokens, against a dictionary of slots: for the reference and twins.

Files of tests import all of them and say what runs. Pages of nobody's and survivors
that do not exist are among what is given.
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
    Rows,
    check_moves,
    layouts,
    make_pages,
    move_arguments,
    random_layout,
)
from vllm_kvpolicy.kernels import compact_pages as shared
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.triton import compact_pages as triton_twin

CASES = settings(max_examples=trials(80), deadline=None, derandomize=True)
NOBODY = [(0, 0, True), (0, 0, False)]


@pytest.fixture(scope="module")
def takes_columns() -> bool:
    """Whether keys may be stored [D, N]; twins in Triton and in CUDA refuse them."""
    return True


def make_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return all bit patterns, NaNs included."""
    integer = INTEGERS[dtype.itemsize]
    info, generator = torch.iinfo(integer), torch.Generator().manual_seed(shape[0])
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=integer)
    return bits.view(dtype)


def rows_of(
    rng: Random, block_size: int, sizes: list[int], loyalty: float
) -> tuple[int, Rows]:
    """Return pages, and moves of heads with survivors of nobody between them."""
    num_pages = sum(sizes) + 5
    layout = random_layout(rng, block_size, sizes, num_pages, loyalty, 0.5)
    rows = [list(head.moves(block_size)) for head in layout[2]]
    return num_pages, [row for own in rows for row in (own, NOBODY)]


@given(
    case=layouts(),
    holes=st.integers(0, 5),
    step=st.sampled_from((1, 2, 8)),
    stays=st.booleans(),
    columns=st.booleans(),
)
@CASES
def test_tokens_arrive_and_nothing_else_changes(
    takes_columns: bool,
    case: tuple[int, int, list[Head]],
    holes: int,
    step: int,
    stays: bool,
    columns: bool,
) -> None:
    """In steps of a few tokens; no mask is given where every page stays."""
    block_size, num_pages, heads = case
    if stays:
        heads = [Head(head.before, head.before, head.kept) for head in heads]
    nobody = [(0, 0, bool(number % 2)) for number in range(holes)]
    rows = [row for head in heads for row in (list(head.moves(block_size)), nobody)]
    pages = make_pages(num_pages, block_size, columns and takes_columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "CHUNK_TOKENS", step)
        patch.setattr(triton_twin, "TILE_TOKENS", step)
        check_moves(compact_pages, pages, rows, give_in_place=not stays)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        (torch.bfloat16, 128, 16),
        (torch.bfloat16, 33, 32),
        (torch.float16, 20, 16),
        (torch.float32, 5, 7),
        (torch.float64, 64, 16),
        (torch.int8, 7, 32),
        (torch.uint8, 1, 1),
    ],
)
def test_tokens_of_every_dtype_and_width_arrive(
    takes_columns: bool, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    """Rows longer than a tile of the real size, in one half of a pool's columns."""
    sizes, bits = [600 // block_size, 3, 0, 1], INTEGERS[dtype.itemsize]
    for half, loyalty in ((0, 0.0), (1, 0.6), (0, 1.0)):
        num_pages, rows = rows_of(Random(head_dim), block_size, sizes, loyalty)
        assert max(map(len, rows)) > triton_twin.TILE_TOKENS
        pool = make_pool((num_pages, block_size, 2 * head_dim), dtype)
        if takes_columns and half == 0:
            pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
        halves = pool.chunk(2, dim=-1)
        before = halves[1 - half].view(bits).clone()
        check_moves(compact_pages, halves[half], rows, give_in_place=loyalty < 1)
        assert torch.equal(halves[1 - half].view(bits), before), "the other half"


def test_slices_of_columns_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SCRATCH_BYTES", 1)
    num_pages, rows = rows_of(Random(1), 16, [9, 5, 0, 7], 0.6)
    pool = make_pool((num_pages, 16, 256), torch.bfloat16)
    check_moves(compact_pages, pool[..., 128:], rows)


def test_a_row_does_not_depend_on_others() -> None:
    num_pages, rows = rows_of(Random(3), 4, [40, 1, 30], 1.0)
    together = make_pages(num_pages, 4, False)
    alone = together.clone()
    *arguments, _ = move_arguments(rows)
    compact_pages(together, *arguments)
    for row in reversed(rows):
        *arguments, _ = move_arguments([row])
        compact_pages(alone, *arguments)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("rows", [[], [[]], [[], [], []], [[], NOBODY]])
def test_nothing_to_move(rows: Rows) -> None:
    for give_in_place in (True, False):
        check_moves(compact_pages, make_pages(2, 4, False), rows, give_in_place)
