"""Moving tokens, against a dictionary of slots, in chunks of a few tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweeps import trials
from support.worker.page_moves import Head, check_moves, layouts, make_pages
from vllm_kvpolicy.kernels import compact_pages
from vllm_kvpolicy.kernels.compact_pages import (
    column_slices,
    compact_pages_ref,
    list_survivors,
    survivor_moves,
)
from vllm_kvpolicy.kernels.libraries import CUDA

CASES = settings(max_examples=trials(150), deadline=None, derandomize=True)
CHUNKS = (1, 2, 3, 7)


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
        pages = make_pages(num_pages, block_size, columns)
        check_moves(compact_pages_ref, pages, moves)


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
        pages = make_pages(num_pages, block_size, False)
        check_moves(compact_pages_ref, pages, moves)


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
        pages = make_pages(num_pages, block_size, True)
        check_moves(compact_pages_ref, pages, moves, give_in_place=False)


def test_two_heads_swap_their_pages() -> None:
    swap = [Head([1], [2], [0, 1]), Head([2], [1], [0, 1])]
    moves = [list(head.moves(2)) for head in swap]
    check_moves(compact_pages_ref, make_pages(3, 2, False), moves)


def test_pages_view_the_cache() -> None:
    """What is moved is the storage itself, whatever its strides."""
    storage = torch.arange(24.0).view(2, 3, 4)
    keys = storage.transpose(-1, -2)
    compact_pages_ref(keys, torch.tensor([7]), torch.tensor([0]), torch.tensor([0, 1]))
    assert storage[0, :, 0].tolist() == storage[1, :, 3].tolist() == [15, 19, 23]


@pytest.mark.parametrize(
    ("limit", "width"), [(2**28, 128), (10 * 128 * 2, 128), (10 * 128 * 2 - 1, 64)]
)
def test_slices_of_columns_bound_the_scratch(
    monkeypatch: pytest.MonkeyPatch, limit: int, width: int
) -> None:
    monkeypatch.setattr(compact_pages, "SCRATCH_BYTES", limit)
    keys = torch.zeros(5, 4, 256, dtype=torch.float16)[..., 128:]
    for number, (slots, scratch) in enumerate(column_slices(keys, 10, True)):
        assert scratch is not None and scratch.shape == (10, width)
        assert slots.shape == (20, width)
        slots += number + 1
    assert keys.unique().tolist() == list(range(1, 128 // width + 1))
    assert (keys == torch.arange(128) // width + 1).all(), "slices view the pages"
    assert [scratch for _, scratch in column_slices(keys, 10, False)] == [None]


def test_slices_are_not_cut_below_their_least_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compact_pages, "SCRATCH_BYTES", 1)
    for size, width in ((128, 32), (96, 96), (192, 96), (33, 33)):
        _, scratch = next(column_slices(torch.zeros(2, 4, size), 7, True))
        assert scratch is not None and scratch.shape == (7, width)


@pytest.mark.parametrize(
    "pages",
    [torch.zeros(2, 3, 4).transpose(1, 2), torch.zeros(2, 6, 4)[:, :3]],
    ids=["columns", "pages apart"],
)
def test_twins_refuse_other_strides(pages: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="pages: expected contiguous channels"):
        next(column_slices(pages, 1, False))


def test_kernels_that_were_not_built_are_an_import_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(CUDA, "path", tmp_path / "_C.abi3.so")
    operation = compact_pages.compact_pages.implementation("cuda")
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ImportError, match="built without CUDA kernels"):
        operation(torch.zeros(1, 1, 1), slots, slots, torch.tensor([0, 1]))


def test_survivors_that_do_not_exist_stay_in_the_null_block() -> None:
    """Head 0 keeps tokens 1, 4, 5, 7; head 1 keeps all of its page."""
    survives = torch.zeros(1, 2, 8, dtype=torch.bool)
    survives[0, 0, [1, 4, 5, 7]] = survives[0, 1, :4] = True
    first = torch.tensor([[0, 1, 2]])
    sources = list_survivors(survives, first, 12, 4)
    assert sources.tolist() == [[1, 4, 5, 7, 8, 9, 10, 11, -1, -1, -1, -1]]
    held, pages = torch.tensor([[[7, 3], [5, 0]]]), torch.tensor([[3, 9, 0]])
    moves = survivor_moves(sources, held, first, pages, None, 8, 4, 1)
    assert moves.source.tolist() == [[[29, 12, 13, 15, 20, 21, 22, 23, 0, 0, 0, 0]]]
    assert moves.dest.tolist() == [[[12, 13, 14, 15, 36, 37, 38, 39, 0, 0, 0, 0]]]
    assert moves.in_place is None


def starts_of(first: torch.Tensor, groups: int) -> list[list[int]]:
    """Return `Moves.first` of events of four heads and eight places of one token."""
    held, pages = torch.zeros(2, 4, 8, dtype=torch.int64), torch.zeros(2, 8).long()
    moves = survivor_moves(pages, held, first, pages, None, 8, 1, groups)
    return moves.first.tolist()


def test_starts_number_the_survivors_of_all_events() -> None:
    first = torch.tensor([[0, 2, 3, 5, 8], [0, 1, 2, 3, 4]])
    assert starts_of(first, 1) == [[0, 2, 3, 5, 8, 8, 9, 10, 11, 12, 16]]
    first = torch.tensor([[0, 2, 4, 5, 8], [0, 1, 4, 6, 8]])
    assert starts_of(first, 2) == [[0, 2, 4, 4, 5, 8, 8], [0, 1, 4, 4, 6, 8, 8]]
