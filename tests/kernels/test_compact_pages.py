"""Moving tokens by the reference and in C++; slices, refusals, and what moves where."""

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernel_checks import forced
from support.twins_of_moves import *  # noqa: F403
from support.worker.page_moves import Head, move_arguments
from vllm_kvpolicy.kernels import compact_pages as module
from vllm_kvpolicy.kernels.compact_pages import (
    column_slices,
    compact_pages,
    compact_pages_ref,
    list_survivors,
    survivor_moves,
)
from vllm_kvpolicy.kernels.libraries import CUDA

in_cpp = compact_pages.implementation("cpu")


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run operations by their references, and again in C++."""
    with forced(request.param):
        yield


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
    monkeypatch.setattr(module, "SCRATCH_BYTES", limit)
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
    monkeypatch.setattr(module, "SCRATCH_BYTES", 1)
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
    operation = compact_pages.implementation("cuda")
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
    moves = survivor_moves(sources, held, first, pages, None, 8, 4)
    assert moves.source.tolist() == [[29, 12, 13, 15, 20, 21, 22, 23, 0, 0, 0, 0]]
    assert moves.dest.tolist() == [[12, 13, 14, 15, 36, 37, 38, 39, 0, 0, 0, 0]]
    assert moves.in_place is None


def test_starts_number_the_survivors_of_all_events() -> None:
    """Two events have four heads and eight places of one token each."""
    held, pages = torch.zeros(2, 4, 8, dtype=torch.int64), torch.zeros(2, 8).long()
    first = torch.tensor([[0, 2, 3, 5, 8], [0, 1, 2, 3, 4]])
    moves = survivor_moves(pages, held, first, pages, None, 8, 1)
    assert moves.first.tolist() == [0, 2, 3, 5, 8, 8, 9, 10, 11, 12, 16]


# -- in C++ ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("limit", "width"), [(2**28, 128), (9 * 128 * 2 - 1, 64)])
def test_scratch_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: int, width: int, columns: bool
) -> None:
    """Two heads swap pages, and one stays on its own."""
    monkeypatch.setattr(module, "SCRATCH_BYTES", limit)
    heads = [Head([1, 2], [3], [1, 2, 5]), Head([3, 4], [1], [0, 7])]
    heads.append(Head([5], [5], [0, 1, 2, 3]))
    moves = move_arguments([list(each.moves(4)) for each in heads])
    pages = torch.randn(6, 4, 128).half()
    pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if columns else pages
    want = pages.clone()
    compact_pages_ref(want, *moves)
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
