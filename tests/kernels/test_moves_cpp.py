"""Moves and the filling of pages in C++: against slots in a dictionary, and references.

They run on the CPU that the tests run on.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from support.sweeps import trials
from support.worker.page_moves import (
    Head,
    check_moves,
    layouts,
    make_pages,
    move_arguments,
)
from vllm_kvpolicy.kernels import compact_pages as moves_of
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.ranking import resize

CASES = settings(max_examples=trials(100), deadline=None, derandomize=True)
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
TOKENS = (1, 17, 300)
in_cpp = compact_pages.implementation("cpu")
both_layouts = pytest.mark.parametrize("columns", [False, True])


@both_layouts
@given(case=layouts(), holes=st.integers(0, 3))
@CASES
def test_tokens_arrive_and_nothing_else_changes(
    columns: bool, case: tuple[int, int, list[Head]], holes: int
) -> None:
    block_size, num_pages, heads = case
    nobody = [(0, 0, bool(number % 2)) for number in range(holes)]
    rows = [row for head in heads for row in (list(head.moves(block_size)), nobody)]
    check_moves(in_cpp, make_pages(num_pages, block_size, columns), rows)


@both_layouts
@given(case=layouts())
@CASES
def test_without_a_mask_every_page_stays(
    columns: bool, case: tuple[int, int, list[Head]]
) -> None:
    block_size, num_pages, heads = case
    heads = [Head(head.before, head.before, head.kept) for head in heads]
    rows = [list(head.moves(block_size)) for head in heads]
    pages = make_pages(num_pages, block_size, columns)
    check_moves(in_cpp, pages, rows, give_in_place=False)


@both_layouts
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_size(dtype: torch.dtype, columns: bool) -> None:
    """Two heads swap pages and keep some tokens."""
    head = partial(Head, kept=[1, 2, 5, 7])
    heads = [head([1, 2], [3]), head([3, 4], [1])]
    pages = (make_pages(5, 4, columns) % 251).to(dtype)
    want = pages.clone()
    moves = move_arguments([list(each.moves(4)) for each in heads])
    in_cpp(pages, *moves)
    compact_pages.reference(want, *moves)
    assert torch.equal(pages, want)


@both_layouts
@pytest.mark.parametrize(("limit", "width"), [(2**28, 128), (9 * 128 * 2 - 1, 64)])
def test_scratch_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: int, width: int, columns: bool
) -> None:
    """Two heads swap pages, and one stays on its own."""
    monkeypatch.setattr(moves_of, "SCRATCH_BYTES", limit)
    heads = [Head([1, 2], [3], [1, 2, 5]), Head([3, 4], [1], [0, 7])]
    heads.append(Head([5], [5], [0, 1, 2, 3]))
    moves = move_arguments([list(each.moves(4)) for each in heads])
    pages = torch.randn(6, 4, 128).half()
    pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if columns else pages
    want = pages.clone()
    compact_pages.reference(want, *moves)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        in_cpp(pages, *moves)
    assert torch.equal(pages, want)
    assert max(each.self_cpu_memory_usage for each in found.events()) == 9 * width * 2


def test_what_does_not_fit_is_refused() -> None:
    slot, first = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1])
    pages = torch.zeros(1, 1, 1)
    with pytest.raises(RuntimeError, match="dest_slots: expected 1"):
        in_cpp(pages, slot, slot.repeat(2), first)
    with pytest.raises(RuntimeError, match="in_place: expected another dtype"):
        in_cpp(pages, slot, slot, first, slot)
    in_place = torch.ones(1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="scratch: expected it where tokens may"):
        torch.ops.vllm_kvpolicy_cpu.compact_pages(
            pages, slot, slot, first, in_place, None
        )


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("tokens", TOKENS)
def test_whole_pages(tokens: int, page: int) -> None:
    """Ties, NaN, rows that hold nothing and rows that want more than they hold."""
    generator = torch.Generator().manual_seed(tokens)
    score = torch.randn(8, tokens, generator=generator)
    score[1], score[2, ::3] = score[1].round(), torch.nan
    score[3] = torch.where(score[3] > 0, 0.0, -0.0)
    kept, must = (
        torch.rand(8, tokens, generator=generator) < share for share in (0.5, 0.2)
    )
    most = tokens // page + 2
    pages, quota = torch.randint(0, most, (2, 8), generator=generator)
    quota[:2] = torch.tensor([0, most])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = kept, score.to(dtype), must, pages, quota, page
        got = resize.implementation("cpu")(*given)
        assert torch.equal(got, resize.reference(*given))
        halves = [each.view(2, 4, *each.shape[1:]) for each in given[:-1]]
        same = resize.implementation("cpu")(*halves, page)
        assert torch.equal(same, got.view(2, 4, -1))
    alike = kept, score, must, pages[3:4].expand(8), quota[4:5].expand(8), page
    got = resize.implementation("cpu")(*alike)
    assert torch.equal(got, resize.reference(*alike))
