"""Moves kept tokens to their places, a program per head and slice of columns.

Source: this project. Deviations: none.
"""

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.compact_pages import column_slices

TILE_TOKENS = 128
TILE_BYTES = 128  # of each token: a line of the cache
WARPS = 8
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact_pages(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; see `kernels.compact_pages`.

    Moves within a page list take one pass over the pages. Those between lists are read
    into scratch before it and written after it.

    Args:
        pages: [P, N, D], mutated; see `column_slices` for its strides.
        source_slots: [M] int64.
        dest_slots: [M] int64.
        first: [rows + 1] int64.
        in_place: [M] bool; None where it holds for all.

    Raises:
        ValueError: `pages` has other strides.

    Exact: moves are bitwise.
    """
    num_rows, num_moves = len(first) - 1, len(source_slots)
    for slots, scratch in column_slices(pages, num_moves, in_place is not None):
        if num_moves == 0:
            continue
        integer = INTEGERS[slots.element_size()]
        slots = slots.view(integer)
        width = slots.shape[1]
        columns = min(triton.next_power_of_2(width), TILE_BYTES // integer.itemsize)
        moves = (slots, slots.stride(0), source_slots, dest_slots, in_place)
        sizes = {"TILE": TILE_TOKENS, "COLUMNS": columns}
        sizes |= {"num_warps": WARPS, "num_stages": 1}
        per_row = (num_rows, triton.cdiv(width, columns))
        per_tile = (triton.cdiv(num_moves, TILE_TOKENS), per_row[1])
        if scratch is None:
            _move_in_place[per_row](*moves, first, width, **sizes)
            continue
        scratch = scratch.view(integer)
        _copy_changed[per_tile](*moves, scratch, num_moves, width, True, **sizes)
        _move_in_place[per_row](*moves, first, width, **sizes)
        _copy_changed[per_tile](*moves, scratch, num_moves, width, False, **sizes)


# What differs between batches must not choose the compiled kernel.
@triton.jit(do_not_specialize=["first_ptr"])
def _move_in_place(
    slots_ptr,  # integers, [slots, width], mutated
    distance,  # between two slots
    source_ptr,  # int64 [M]
    dest_ptr,  # int64 [M]
    in_place_ptr,  # bool [M], or None where it holds for all
    first_ptr,  # int64 [rows + 1]
    width,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Walk the survivors of one row towards its end, a tile of them at a time.

    A row's sources ascend in the order of its page list, and each destination is at or
    before its source. Whatever a tile overwrites is therefore a source of this tile or
    of an earlier one, never of a later one.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(first_ptr + row)
    end = tl.load(first_ptr + row + 1)
    # No survivor lies in slot 0: in a row that begins there, none exists.
    head = tl.load(source_ptr + start, mask=start < end, other=0)
    end = tl.where(head == 0, start, end)
    for begin in range(start, end, TILE):
        move = begin + tl.arange(0, TILE)
        moves = move < end
        source = tl.load(source_ptr + move, mask=moves, other=0)
        dest = tl.load(dest_ptr + move, mask=moves, other=0)
        moves &= source != dest
        if in_place_ptr is not None:
            moves &= tl.load(in_place_ptr + move, mask=moves, other=0) != 0
        mask = moves[:, None] & (column < width)[None, :]
        old = slots_ptr + source[:, None] * distance + column[None, :]
        tokens = tl.load(old, mask=mask, other=0)
        # The barrier orders every read of the tile before its first write. One is
        # enough: a warp that runs ahead reads sources of the next tile, which nobody
        # has overwritten, and waits here before it writes.
        tl.debug_barrier()
        new = slots_ptr + dest[:, None] * distance + column[None, :]
        tl.store(new, tokens, mask=mask)


@triton.jit(do_not_specialize=["num_moves"])
def _copy_changed(
    slots_ptr,  # integers, [slots, width], mutated
    distance,  # between two slots
    source_ptr,  # int64 [M]
    dest_ptr,  # int64 [M]
    in_place_ptr,  # bool [M]
    scratch_ptr,  # integers, [M, width], mutated
    num_moves,
    width,
    TO_SCRATCH: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read into scratch, or write from it, what changes pages."""
    move = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    moves = move < num_moves
    source = tl.load(source_ptr + move, mask=moves, other=0)
    dest = tl.load(dest_ptr + move, mask=moves, other=0)
    moves &= source != dest
    moves &= tl.load(in_place_ptr + move, mask=moves, other=1) == 0
    mask = moves[:, None] & (column < width)[None, :]
    place = scratch_ptr + move[:, None] * width + column[None, :]
    if TO_SCRATCH:
        old = slots_ptr + source[:, None] * distance + column[None, :]
        tl.store(place, tl.load(old, mask=mask, other=0), mask=mask)
    else:
        new = slots_ptr + dest[:, None] * distance + column[None, :]
        tl.store(new, tl.load(place, mask=mask, other=0), mask=mask)
