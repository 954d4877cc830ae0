"""Twins of kernels.page_tables: filled by a program per row and run of columns."""

import torch
import triton
import triton.language as tl

COLUMNS = 256  # of a program


def page_tables(
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    global_blocks: torch.Tensor,
    num_global: torch.Tensor,
    frontier_blocks: torch.Tensor,
    block_size: int,
) -> None:
    """Put each row's global superblocks in front of its local ones; see the reference.

    Rows of `tables`, `block_table` and `global_blocks` are contiguous.
    """
    num_rows, num_columns = tables.shape
    _page_tables[(num_rows, triton.cdiv(num_columns, COLUMNS))](
        tables,
        lengths,
        rows,
        block_table,
        seq_lens,
        global_blocks,
        num_global,
        frontier_blocks,
        tables.stride(0),
        block_table.stride(0),
        global_blocks.stride(0),
        num_columns,
        block_table.shape[1],
        block_size,
        COLUMNS=COLUMNS,
    )


def enter_requests(
    index: torch.Tensor,
    dest: torch.Tensor,
    frontier: torch.Tensor,
    global_blocks: torch.Tensor,
    num_global: torch.Tensor,
    frontier_blocks: torch.Tensor,
) -> None:
    """Enter where the survivors of some requests are now; see the reference."""
    _enter_requests[(len(index),)](
        index.contiguous(),
        dest.contiguous(),
        frontier.contiguous(),
        global_blocks,
        num_global,
        frontier_blocks,
        global_blocks.stride(0),
        dest.shape[1],
        TILE=COLUMNS,
    )


@triton.jit(do_not_specialize=["num_columns", "table_columns"])
def _page_tables(
    tables,  # [R, C] int32
    lengths,  # [R] int32
    rows,  # [R] int64
    block_table,  # [R, P] int32
    seq_lens,  # [R] int32
    global_blocks,  # [S, A] int32
    num_global,  # [S] int32
    frontier_blocks,  # [S] int32
    tables_stride: tl.int64,
    block_table_stride: tl.int64,
    global_stride: tl.int64,
    num_columns,
    table_columns,
    block_size,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    held = tl.load(num_global + slot)
    frontier = tl.load(frontier_blocks + slot)
    if tl.program_id(1) == 0:
        length = tl.load(seq_lens + row) - (frontier - held) * block_size
        tl.store(lengths + row, length)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    is_global = column < held
    local = tl.minimum(tl.maximum(column - held + frontier, 0), table_columns - 1)
    own = block_table + row * block_table_stride + local
    block = tl.load(own, mask=is_column & ~is_global, other=0)
    survivors = global_blocks + slot * global_stride + column
    block += tl.load(survivors, mask=is_column & is_global, other=0)
    tl.store(tables + row * tables_stride + column, block, mask=is_column)


@triton.jit(do_not_specialize=["num_dest"])
def _enter_requests(
    index,  # [E] int64
    dest,  # [E, D] int64
    frontier,  # [E] int64
    global_blocks,  # [S, A] int32, written
    num_global,  # [S] int32, written
    frontier_blocks,  # [S] int32, written
    global_stride: tl.int64,
    num_dest,
    TILE: tl.constexpr,
):
    event = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + event)
    tl.store(num_global + slot, num_dest)
    tl.store(frontier_blocks + slot, tl.load(frontier + event).to(tl.int32))
    for begin in range(0, num_dest, TILE):
        place = begin + tl.arange(0, TILE)
        inside = place < num_dest
        block = tl.load(dest + event * num_dest + place, mask=inside, other=0)
        target = global_blocks + slot * global_stride + place
        tl.store(target, block.to(tl.int32), mask=inside)
