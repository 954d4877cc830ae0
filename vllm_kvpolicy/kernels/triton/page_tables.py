"""Twins of kernels.page_tables: a program per run of columns, or per row and head."""

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 256  # of a program, or at a time
ENTRIES = 1024  # of a list, per program
# Arguments whose values do not make a kernel of their own: those of an event's tables.
VARYING = [
    *("tables_layer", "tables_row", "tables_head", "offsets_layer", "offsets_row"),
    *("offsets_head", "blocks_row", "num_columns", "num_blocks"),
]


def page_tables(
    tables: Tensor,
    lengths: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    global_blocks: Tensor,
    num_global: Tensor,
    skip: Tensor,
    pinned: Tensor,
    block_size: int,
) -> None:
    """Rows of `tables`, `block_table` and `global_blocks` are contiguous."""
    num_rows, num_columns = tables.shape
    batch = tables, lengths, rows, block_table, seq_lens
    survivors = global_blocks, num_global, skip, pinned
    strides = tables.stride(0), block_table.stride(0), global_blocks.stride(0)
    sizes = num_columns, block_table.shape[1], block_size
    _page_tables[(num_rows, triton.cdiv(num_columns, COLUMNS))](
        *batch, *survivors, *strides, *sizes, COLUMNS=COLUMNS
    )


def enter_requests(
    index: Tensor,
    dest: Tensor,
    frontier: Tensor,
    pins: Tensor,
    global_blocks: Tensor,
    num_global: Tensor,
    skip: Tensor,
    pinned: Tensor,
) -> None:
    entered = (each.contiguous() for each in (index, dest, frontier, pins))
    table = global_blocks, num_global, skip, pinned
    _enter_requests[(len(index),)](
        *entered, *table, global_blocks.stride(0), dest.shape[1], TILE=COLUMNS
    )


@triton.jit(do_not_specialize=["num_columns", "table_columns"])
def _page_tables(
    tables, lengths, rows, block_table, seq_lens,
    global_blocks, num_global, skip, pinned,
    tables_stride: tl.int64, block_table_stride: tl.int64, global_stride: tl.int64,
    num_columns, table_columns, block_size,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    held = tl.load(num_global + slot)
    skipped = tl.load(skip + slot) - held
    if tl.program_id(1) == 0:
        tl.store(lengths + row, tl.load(seq_lens + row) - skipped * block_size)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    place = column - tl.load(pinned + slot)
    is_global = (place >= 0) & (place < held)
    local = tl.where(place < 0, column, column + skipped)
    local = tl.minimum(tl.maximum(local, 0), table_columns - 1)
    own = block_table + row * block_table_stride + local
    block = tl.load(own, mask=is_column & ~is_global, other=0)
    survivors = global_blocks + slot * global_stride + place
    block += tl.load(survivors, mask=is_column & is_global, other=0)
    tl.store(tables + row * tables_stride + column, block, mask=is_column)


@triton.jit(do_not_specialize=["num_dest"])
def _enter_requests(
    index, dest, frontier, pins, global_blocks, num_global, skip, pinned,
    global_stride: tl.int64, num_dest,
    TILE: tl.constexpr,
):  # fmt: skip
    event = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + event)
    tl.store(num_global + slot, num_dest)
    pin = tl.load(pins + event)
    tl.store(pinned + slot, pin.to(tl.int32))
    tl.store(skip + slot, (tl.load(frontier + event) - pin).to(tl.int32))
    for begin in range(0, num_dest, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < num_dest
        block = tl.load(dest + event * num_dest + place, mask=inside, other=0)
        target = global_blocks + slot * global_stride + place
        tl.store(target, block.to(tl.int32), mask=inside)


def head_page_tables(
    tables: Tensor,
    offsets: Tensor,
    which: Tensor,
    slots: Tensor,
    blocks: Tensor,
    skip: Tensor,
    pinned: Tensor,
    global_blocks: Tensor,
    pages: Tensor,
    first: Tensor,
    own_page: Tensor,
    stride: int,
) -> None:
    """Rows of `blocks`, `global_blocks` and `first`, and `pages`, are contiguous."""
    num_layers, _, num_heads, num_columns = tables.shape
    batch = tables, offsets, which, slots, blocks
    lists = skip, pinned, global_blocks, pages, first, own_page
    strides = *tables.stride()[:3], *offsets.stride()
    rows = blocks.stride(0), global_blocks.stride(0), first.stride(0)
    sizes = num_heads, num_columns, blocks.shape[1]
    _head_page_tables[(num_layers * num_heads, len(which))](
        *batch, *lists, *strides, *rows, stride, *sizes, COLUMNS=COLUMNS
    )


def enter_page_lists(
    table_pages: Tensor,
    table_first: Tensor,
    index: Tensor,
    dest: Tensor,
    first: Tensor,
    pages: Tensor,
) -> Tensor:
    """`table_pages` is contiguous."""
    num_events, num_cells = pages.shape
    counts = first.new_empty(2, num_events)
    lists = index, dest.contiguous(), first.contiguous(), pages.contiguous()
    sizes = table_first.stride(0), num_events, first.shape[1] - 1, num_cells
    _enter_page_lists[(1 + triton.cdiv(num_cells, ENTRIES), num_events)](
        table_pages, table_first, *lists, counts, *sizes, TILE=ENTRIES
    )
    return counts


@triton.jit(do_not_specialize=VARYING)
def _head_page_tables(
    tables, offsets, which, slots, blocks, skip, pinned, global_blocks, pages, first,
    own_page,
    tables_layer: tl.int64, tables_row: tl.int64, tables_head: tl.int64,
    offsets_layer: tl.int64, offsets_row: tl.int64, offsets_head: tl.int64,
    blocks_row: tl.int64, globals_row: tl.int64, first_row: tl.int64,
    stride, num_heads, num_columns, num_blocks,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    layer, head = (number // num_heads).to(tl.int64), number % num_heads
    row = tl.load(which + tl.program_id(1))
    slot = tl.load(slots + tl.program_id(1))
    skipped, first_global = tl.load(skip + slot), tl.load(pinned + slot)
    start = tl.load(first + slot * first_row + number)
    count = tl.load(first + slot * first_row + number + 1) - start
    place = offsets + layer * offsets_layer + row * offsets_row + head * offsets_head
    tl.store(place, count - skipped)
    own = tl.load(own_page + number)
    per_block = tl.num_programs(0)  # heads of all layers
    owners = global_blocks + slot * globals_row
    target = tables + layer * tables_layer + row * tables_row + head * tables_head
    for begin in range(0, num_columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        order = column - first_global
        is_global = (order >= 0) & (order < count)
        is_listed, listed = is_column & is_global, start + order
        owner = tl.load(owners + listed // per_block, mask=is_listed, other=0)
        listed = owner.to(tl.int64) * per_block + listed % per_block
        page = tl.load(pages + listed, mask=is_listed, other=0)
        local = tl.where(order < 0, column, column - count + skipped)
        local = tl.minimum(tl.maximum(local, 0), num_blocks - 1)
        entry = blocks + row * blocks_row + local
        block = tl.load(entry, mask=is_column & ~is_global, other=0).to(tl.int64)
        page = tl.where(is_global, page, (block * stride + own).to(tl.int32))
        tl.store(target + column, page, mask=is_column)


@triton.jit(do_not_specialize=["num_events", "num_cells"])
def _enter_page_lists(
    table_pages, table_first, index, dest, first, pages, counts,
    first_row: tl.int64, num_events, num_heads, num_cells,
    TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of one request's pages; its first program sees to the starts."""
    tile = tl.program_id(0)  # the one axis of a grid with more than 65,535 programs
    event = tl.program_id(1).to(tl.int64)
    slot = tl.load(index + event)
    if tile == 0:
        first += event * (num_heads + 1)
        longest = tl.full((), 0, tl.int64)
        for begin in range(0, num_heads + 1, TILE):
            head = begin + tl.arange(0, TILE)
            inside = head <= num_heads
            start = tl.load(first + head, mask=inside, other=0)
            target = table_first + slot * first_row + head
            tl.store(target, start.to(tl.int32), mask=inside)
            end = tl.load(first + head + 1, mask=head < num_heads, other=0)
            longest = tl.maximum(longest, tl.max(end - start))
        tl.store(counts + event, longest)
        tl.store(counts + num_events + event, tl.load(first + num_heads))
        return
    cell = (tile - 1) * TILE + tl.arange(0, TILE)
    inside = cell < num_cells
    page = tl.load(pages + event * num_cells + cell, mask=inside, other=0)
    dest += event * (num_cells // num_heads)
    block = tl.load(dest + cell // num_heads, mask=inside, other=0)
    target = table_pages + block * num_heads + cell % num_heads
    tl.store(target, page.to(tl.int32), mask=inside)
