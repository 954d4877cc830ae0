"""Lists, on the device, the blocks of keys that each tile of queries has to read.

One launch stores the latest `until` of every block of keys of a row, another one
sifts a row's blocks for each tile. Their sizes follow from those of the batch.
"""

import torch
import triton
import triton.language as tl

NEVER_SEEN = tl.constexpr(-(2**31))  # below every position
REACHES = 16  # blocks whose `until` a program reduces at once
LISTED = 1024  # blocks that a program sifts at once
ROWS = ["tables", "table_stride", "lengths", "query_start", "ends", "num_rows"]
VARYING = [*ROWS, "reaches", "lists", "counts", "tile_rows", "num_blocks"]


def lists_of_tiles(
    rows: tuple,
    until: tuple,
    page_size: int,
    num_tiles: int,
    queries: int,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the blocks of keys that any query of a tile sees.

    Row r's tiles begin at number query_start[r] // queries + r, which leaves room for
    all of them. Blocks that end after a tile's first query are not listed.

    Args:
        rows: tables, stride of their rows, lengths, query_start and ends of
            `until_attention`.
        until: [P, N] int32, and its strides.
        page_size: N.
        num_tiles: at least Tq // queries + R.
        queries: of a tile.
        block: keys of a block.

    Returns:
        [tiles, blocks] int32 numbers of blocks of a row, ascending; [tiles] int32, how
        many; [tiles] int32, each tile's row, -1 for tiles without queries.
    """
    tables, _, lengths, query_start, ends = rows
    num_rows, num_blocks = len(tables), triton.cdiv(tables.shape[1] * page_size, block)
    reaches, lists, counts, tile_rows = (
        torch.empty(shape, dtype=torch.int32, device=tables.device)
        for shape in ((num_rows, num_blocks), (num_tiles, num_blocks), *[num_tiles] * 2)
    )
    _reaches_of_blocks[(num_rows, triton.cdiv(num_blocks, REACHES))](
        *(*rows[:3], *until, reaches, num_blocks),
        PAGE=page_size,
        BLOCK=block,
        BLOCKS=REACHES,
    )
    _blocks_of_tiles[(num_tiles,)](
        *(lengths, query_start, ends),
        *(reaches, lists, counts, tile_rows, num_rows, num_blocks),
        QUERIES=queries,
        BLOCK=block,
        BLOCKS=LISTED,
    )
    return lists, counts, tile_rows


@triton.jit(do_not_specialize=VARYING)
def _reaches_of_blocks(
    tables, table_stride, lengths, until, until_page, until_slot, reaches, num_blocks,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write `reaches` [R, blocks]: the latest `until` of each block's held tokens."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    first = tl.program_id(1) * BLOCKS
    if first * BLOCK >= length:
        return
    block = first + tl.arange(0, BLOCKS)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_held = token < length
    page = tl.load(tables + row * table_stride + token // PAGE, is_held, other=0)
    slot = (token % PAGE).to(tl.int64)
    place = page.to(tl.int64) * until_page + slot * until_slot
    end = tl.load(until + place, is_held, other=NEVER_SEEN)
    tl.store(reaches + row * num_blocks + block, tl.max(end, 1), block < num_blocks)


@triton.jit(do_not_specialize=VARYING)
def _blocks_of_tiles(
    lengths, query_start, ends, reaches, lists, counts, tile_rows, num_rows, num_blocks,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write each tile's row, and the blocks of its list.

    `counts` [tiles] of blocks in `lists` [tiles, blocks]; `tile_rows` [tiles], -1 for
    numbers that no row uses.
    """
    tile = tl.program_id(0).to(tl.int64)
    row, above = tl.full((), 0, tl.int32), num_rows
    while above - row > 1:  # the last row whose tiles begin at this number or before
        middle = (row + above) // 2
        begins = tl.load(query_start + middle) // QUERIES + middle
        row = tl.where(begins <= tile, middle, row)
        above = tl.where(begins <= tile, above, middle)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    first = (tile - (start // QUERIES + row)).to(tl.int32) * QUERIES
    is_used = first < count
    tl.store(tile_rows + tile, tl.where(is_used, row, -1))
    if is_used:
        position = tl.load(ends + row) - count + first
        whole = (tl.load(lengths + row) - count + first + 1) // BLOCK
        listed = 0
        for begin in range(0, whole, BLOCKS):
            block = begin + tl.arange(0, BLOCKS)
            reach = reaches + row.to(tl.int64) * num_blocks + block
            end = tl.load(reach, block < whole, other=NEVER_SEEN)
            is_seen = (end > position) & (block < whole)
            place = listed + tl.cumsum(is_seen.to(tl.int32), 0) - 1
            tl.store(lists + tile * num_blocks + place, block, is_seen)
            listed += tl.sum(is_seen.to(tl.int32), 0)
        tl.store(counts + tile, listed)
