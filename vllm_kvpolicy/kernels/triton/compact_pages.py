"""Twins of kernels.compact_pages: moves by a program per head and slice of columns.

What is remembered is one gather and one scatter for all values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.compact_pages import Moves, column_slices

TILE_TOKENS = 128
TILE_BYTES = 128  # of each token: a line of the cache
WARPS = 8
LIST_TILE = 1024  # entries of a list that a program looks at at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact_pages(
    pages: Tensor,
    source_slots: Tensor,
    dest_slots: Tensor,
    first: Tensor,
    in_place: Tensor | None = None,
) -> None:
    """Copy tokens of pages that `column_slices` takes.

    Moves within a page list take one pass over the pages. Those between lists are read
    into scratch before it and written after it.
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


def list_survivors(
    survives: Tensor, first: Tensor, num_places: int, block_size: int
) -> Tensor:
    num_events, num_heads, num_tokens = survives.shape
    listed = first.new_empty(num_events, num_places)
    given = survives.contiguous(), first, *first.stride()
    sizes = num_heads, num_tokens, num_places, block_size
    _list_survivors[(num_events, num_heads)](*given, listed, *sizes, TILE=LIST_TILE)
    return listed


def survivor_moves(
    sources: Tensor,
    held: Tensor,
    first: Tensor,
    pages: Tensor,
    unmoved: Tensor | None,
    num_tokens: int,
    block_size: int,
) -> Moves:
    (num_events, num_places), num_heads = sources.shape, held.shape[1]
    source, dest = (sources.new_empty(sources.shape) for _ in range(2))
    in_place = None
    if unmoved is not None:
        unmoved = unmoved.contiguous()
        in_place = torch.empty_like(source, dtype=torch.bool)
    starts = sources.new_empty(num_events * (num_heads + 1) + 1)
    given = sources.contiguous(), held.contiguous(), first, *first.stride()
    lists = pages.contiguous(), unmoved
    sizes = num_events, num_heads, held.shape[-1], num_tokens, num_places, block_size
    _survivor_moves[(1 + triton.cdiv(num_places, LIST_TILE), num_events)](
        *(*given, *lists, source, dest, starts, in_place, *sizes), TILE=LIST_TILE
    )
    return Moves(source, dest, starts, in_place)


# What differs between batches must not choose the compiled kernel.
@triton.jit(do_not_specialize=["first_ptr"])
def _move_in_place(
    slots_ptr, distance, source_ptr, dest_ptr, in_place_ptr, first_ptr, width,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Walk the survivors of one row towards its end, a tile of them at a time.

    `slots_ptr` has integers [slots, width], of which two rows are `distance` apart.
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
    slots_ptr, distance, source_ptr, dest_ptr, in_place_ptr, scratch_ptr,
    num_moves, width,
    TO_SCRATCH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Read into scratch [M, width], or write from it, what changes pages."""
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


@triton.jit(do_not_specialize=["first_row", "num_tokens", "num_places"])
def _list_survivors(
    survives, first, first_row, first_head, listed,
    num_heads, num_tokens, num_places, block_size,
    TILE: tl.constexpr,
):  # fmt: skip
    """List one head's survivors; behind them nothing, up to the next head's."""
    event = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    survives += (event * num_heads + head) * num_tokens
    listed += event * num_places
    first += event * first_row + head * first_head
    place = tl.load(first) * block_size
    for begin in range(0, num_tokens, TILE):
        token = begin + tl.arange(0, TILE)
        flag = tl.load(survives + token, mask=token < num_tokens, other=0)
        rank = tl.cumsum(flag.to(tl.int32)) - 1
        inside = flag & (place + rank < num_places)
        tl.store(listed + place + rank, head * num_tokens + token, mask=inside)
        place += tl.sum(flag.to(tl.int32))
    end = tl.load(first + first_head) * block_size
    if head == num_heads - 1:
        end += num_places - end
    for begin in range(place, end, TILE):
        behind = begin + tl.arange(0, TILE)
        nobody = tl.full((TILE,), -1, tl.int64)
        tl.store(listed + behind, nobody, mask=behind < end)


@triton.jit(
    do_not_specialize=["first_row", "num_events", "width", "num_tokens", "num_places"]
)
def _survivor_moves(
    sources, held, first, first_row, first_head, pages, unmoved,
    source, dest, starts, in_place,
    num_events, num_heads, width, num_tokens, num_places, block_size,
    TILE: tl.constexpr,
):  # fmt: skip
    """Look one tile of survivors up; the first program of an event sees to starts.

    Writes `source`, `dest`, `starts` and `in_place`: the fields of `Moves`.
    """
    tile = tl.program_id(0)  # the one axis of a grid with more than 65,535 programs
    event = tl.program_id(1).to(tl.int64)
    if tile == 0:
        for begin in range(0, num_heads + 1, TILE):
            head = begin + tl.arange(0, TILE)
            is_row = head <= num_heads
            entry = first + event * first_row + head * first_head
            start = tl.load(entry, mask=is_row, other=0) * block_size
            start += event * num_places
            row = starts + event * (num_heads + 1) + head
            tl.store(row, start, mask=is_row)
            is_last = (head == num_heads) & (event == num_events - 1)
            tl.store(row + 1, start * 0 + num_events * num_places, mask=is_last)
        return
    place = (tile - 1) * TILE + tl.arange(0, TILE)
    is_place = place < num_places
    target = event * num_places + place
    entry = tl.load(sources + target, mask=is_place, other=-1)
    exists = entry >= 0
    head, token = entry // num_tokens, entry % num_tokens
    lists = held + (event * num_heads + head) * width
    page = tl.load(lists + token // block_size, mask=exists, other=0)
    slot = page * block_size + token % block_size
    listed = event * (num_places // block_size) + place // block_size
    page = tl.load(pages + listed, mask=exists, other=0)
    tl.store(source + target, tl.where(exists, slot, 0), mask=is_place)
    slot = page * block_size + place % block_size
    tl.store(dest + target, tl.where(exists, slot, 0), mask=is_place)
    if unmoved is not None:
        stays = tl.load(unmoved + listed, mask=is_place, other=0)
        tl.store(in_place + target, stays, mask=is_place)


TILE = 512  # values of a program


def read_survivors(
    survivors: Tensor,
    local: Tensor,
    which: Tensor,
    index: Tensor,
    first: Tensor,
    global_blocks: Tensor,
    num_tokens: int,
) -> Tensor:
    num_events, (num_heads, most_local) = len(index), local.shape[2:]
    values = survivors.new_empty(len(which), num_events, num_heads, num_tokens)
    grid = (num_events * num_heads, triton.cdiv(num_tokens, TILE), len(which))
    tables = survivors, local, which, index
    strides = survivors.stride(0), local.stride(0), global_blocks.stride(0)
    sizes = num_events, num_heads, survivors.shape[-1], most_local, num_tokens
    _read_survivors[grid](
        *(*tables, first.contiguous(), global_blocks, values, *strides, *sizes),
        TILE=TILE,
    )
    return values


def write_survivors(
    survivors: Tensor,
    local: Tensor,
    which: Tensor,
    index: Tensor,
    values: Tensor,
    sources: Tensor,
    num_pages: Tensor,
    num_local: Tensor,
    global_blocks: Tensor,
) -> None:
    num_events, (num_heads, most_local) = len(index), local.shape[2:]
    num_places, num_tokens = sources.shape[1], values.shape[-1]
    list_tiles = triton.cdiv(num_places, TILE)
    local_tiles = triton.cdiv(num_heads * most_local, TILE)
    tables = survivors, local, which, index
    given = values.contiguous(), sources.contiguous(), num_pages, *num_pages.stride()
    strides = survivors.stride(0), local.stride(0), global_blocks.stride(0)
    sizes = num_events, num_heads, survivors.shape[-1], most_local
    _write_survivors[(list_tiles + local_tiles, num_events, len(which))](
        *(*tables, *given, num_local, global_blocks, *strides),
        *(*sizes, num_places, num_tokens),
        TILE=TILE,
    )


@triton.jit(do_not_specialize=["num_events", "num_tokens"])
def _read_survivors(
    survivors, local, which, index, first, global_blocks, values,
    survivors_stride: tl.int64, local_stride: tl.int64, blocks_stride: tl.int64,
    num_events, num_heads, width, most_local, num_tokens,
    TILE: tl.constexpr,
):  # fmt: skip
    """Read a tile of one head's tokens."""
    row = tl.program_id(0).to(tl.int64)
    event, head = row // num_heads, row % num_heads
    table = tl.load(which + tl.program_id(2))
    slot = tl.load(index + event)
    block_size = width // num_heads
    bounds = first + event * (num_heads + 1) + head
    start = tl.load(bounds).to(tl.int64) * block_size
    count = tl.load(bounds + 1).to(tl.int64) * block_size - start
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < num_tokens
    is_kept = inside & (token < count)
    entry = start + token
    listed = global_blocks + slot * blocks_stride + entry // width
    block = tl.load(listed, mask=is_kept, other=0).to(tl.int64)
    address = table * survivors_stride + block * width + entry % width
    value = tl.load(survivors + address, mask=is_kept, other=0.0)
    place = token - count
    is_local = inside & (place >= 0) & (place < most_local)
    address = table * local_stride + (slot * num_heads + head) * most_local + place
    value += tl.load(local + address, mask=is_local, other=0.0)
    out = (tl.program_id(2) * num_events + event) * num_heads + head
    tl.store(values + out * num_tokens + token, value, mask=inside)


VARYING = ["event_stride", "head_stride", "num_events", "num_places", "num_tokens"]


@triton.jit(do_not_specialize=VARYING)
def _write_survivors(
    survivors, local, which, index, values, sources,
    num_pages, event_stride, head_stride, num_local, global_blocks,
    survivors_stride: tl.int64, local_stride: tl.int64, blocks_stride: tl.int64,
    num_events, num_heads, width, most_local, num_places, num_tokens,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write a tile of one event's survivors, or of its local tokens."""
    tile = tl.program_id(0)  # the one axis of a grid with more than 65,535 programs
    event = tl.program_id(1).to(tl.int64)
    table = tl.load(which + tl.program_id(2))
    slot = tl.load(index + event)
    values += (tl.program_id(2) * num_events + event) * num_heads * num_tokens
    list_tiles = (num_places + TILE - 1) // TILE
    if tile < list_tiles:
        place = tile * TILE + tl.arange(0, TILE)
        inside = place < num_places
        source = tl.load(sources + event * num_places + place, mask=inside, other=-1)
        value = tl.load(values + source, mask=source >= 0, other=0.0)
        listed = global_blocks + slot * blocks_stride + place // width
        block = tl.load(listed, mask=inside, other=0).to(tl.int64)
        address = table * survivors_stride + block * width + place % width
        tl.store(survivors + address, value, mask=inside)
        return
    entry = (tile - list_tiles) * TILE + tl.arange(0, TILE)
    inside = entry < num_heads * most_local
    head, token = (entry // most_local).to(tl.int64), entry % most_local
    pages = num_pages + event * event_stride + head * head_stride
    place = tl.load(pages, mask=inside, other=0) * (width // num_heads) + token
    is_local = inside & (token < tl.load(num_local + event))
    value = tl.load(values + head * num_tokens + place, mask=is_local, other=0.0)
    address = table * local_stride + slot * num_heads * most_local + entry
    tl.store(local + address, value, mask=inside)
