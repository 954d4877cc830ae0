"""Attention over pages, hidden tokens left out, in blocks of keys.

Prompts: a program takes a tile of queries with all their heads, so that tensor cores
get full tiles. Two small launches first store the latest `until` of every block of
keys, and for each tile the blocks that any of its queries sees; the loop over these is
free of branches, so that loads run ahead of products. Only blocks that reach past
the tile's first query take the causal mask. The longest tiles start first.
Decoding: a program takes a share of a row's blocks, a second launch puts shares
together (flash decoding). How many shares there are follows from R, C and N alone,
never from lengths, so that graphs can capture it; hidden tokens are not fetched.
No launch waits for a number on the device.

Memory: a block of keys is gathered token by token through the page list, N of any size,
and read where it lies, with 64-bit offsets; fastest where D is contiguous, as vLLM's
GPU kernels keep it. The device also holds R * C * N / block integers and as many per
tile of queries, and for decoding shares [R, shares, G, D] in float32.

A query's block order is that of its tokens, whatever the tile. So results do not
depend on other rows, nor on how prompts are cut into tiles; those of decoding depend on
the number of shares, and so on R, C and N, in their rounding.
Deviations from the reference, all of them rounding: the order of sums, and weights
rounded to the dtype of the values before they are multiplied, as in FlashAttention.

Writing until when tokens are visible is one launch for all tokens. No slot has two
writers: a new token whose decision comes in the same step is left to the token that
decides.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.visibility import NEVER, Decisions

TILE = 128  # of tokens times heads
KEPT = tl.constexpr(NEVER)


def write_until(
    until: Tensor,
    decisions: Decisions,
    own: Tensor,
    governed: Tensor,
    position: Tensor,
    heads: Tensor,
    base: int,
    window: int,
    shift: int,
    sinks: int,
) -> None:
    """Write until when queries see tokens; nothing for tokens that are nowhere."""
    values = decisions.values
    if not values.numel():
        return
    given = until, values, *values.stride(), own, governed, position, heads
    numbers = base, decisions.scale, decisions.most, window, shift, sinks
    _write_until[(triton.cdiv(values.numel(), TILE),)](
        *(*given, *values.shape, *numbers),
        IS_DECIDED=values.dtype == torch.bool,
        TILE=TILE,
    )


NUMBERS = ["value_row", "value_head", "num_tokens", "num_heads"]


@triton.jit(do_not_specialize=[*NUMBERS, "base", "window", "shift", "sinks"])
def _write_until(
    until, values, value_row: tl.int64, value_head: tl.int64,
    own, governed, position, heads,
    num_tokens, num_heads, base: tl.int64, scale, most, window, shift, sinks,
    IS_DECIDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token, head = entry // num_heads, entry % num_heads
    is_token = token < num_tokens
    start = until + base + tl.load(heads + head)
    source = values + token.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    value = tl.load(source, is_token, other=0)
    keeps = value.to(tl.int32) != 0 if IS_DECIDED else value * scale <= most
    place = tl.load(position + token, is_token, other=0) - shift
    target = tl.load(governed + token, is_token, other=0)
    last = tl.where(keeps | (place < sinks), KEPT, (place + window).to(tl.int32))
    tl.store(start + target, last, target > 0)
    if shift > 0:
        mine = tl.load(own + token, is_token, other=0)
        decides = token + shift
        decided = tl.load(governed + decides, decides < num_tokens, other=0)
        tl.store(start + mine, KEPT, (mine > 0) & (mine != decided))


TO_BASE_2 = 1.4426950408889634  # exp(x) = exp2(x * TO_BASE_2)
NEVER_SEEN = tl.constexpr(-(2**31))  # below every position
LOWEST = tl.constexpr(-1.0e30)  # below every logit; finite, so differences are numbers
SHARES = 128  # of a row, at most
PROGRAMS = 2048  # of a decode launch, about: 15 for each processor of an H200
LEAST = 256  # tokens of a share that is worth a program
SHARES_AT_ONCE = 16
REACHES = 16  # blocks whose `until` a program reduces at once
LISTED = 1024  # blocks that a program sifts at once
# What differs between batches, alignment too, must not choose the compiled kernel.
ROWS = ["tables", "table_stride", "lengths", "query_start", "ends"]
VARYING = [*ROWS, "lists", "counts", "tile_rows", "num_blocks"]
LISTS_VARYING = [*VARYING, "num_rows", "reaches"]


class _Sizes(NamedTuple):
    """What a kernel is compiled for."""

    PAGE: int  # N
    GROUP: int  # G
    SIZE: int  # D
    WIDTH: int  # D, up to a power of two
    TILE: int  # query heads of a program
    BLOCK: int  # keys of a block


def until_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    ends: Tensor,
    until: Tensor,
    scale: float,
    output: Tensor,
    max_queries: int,
) -> None:
    """Queries of no row are left as they were in `output`."""
    sizes = _sizes(query, keys.shape[1], max_queries)
    rows = tables, tables.stride(0), lengths, query_start, ends
    pools = (
        *(keys, *keys.stride(), values, *values.stride(), until, *until.stride()),
        *(scale * TO_BASE_2, query, *query.stride()),
    )
    if len(tables) and len(query):
        attend = _attend_in_tiles if max_queries > 1 else _attend_in_shares
        attend(rows, pools, output, sizes)


def _sizes(query: Tensor, page_size: int, max_queries: int) -> _Sizes:
    """Choose tiles from sizes alone: a tile of queries, keys and values fit on chip."""
    group, size = query.shape[1:]
    width = max(16, triton.next_power_of_2(size))
    row_bytes = width * query.element_size()
    # 128 query heads and 64 keys for D = 128 in 16 bits; 32 and 32 for float32, whose
    # products run without tensor cores.
    most = min(128, max(16, 65536 // (row_bytes * query.element_size())))
    tile = min(most, max(16, triton.next_power_of_2(max_queries * group)))
    tile = max(tile, triton.next_power_of_2(group))
    block = min(64, max(16, 16384 // row_bytes))
    return _Sizes(page_size, group, size, width, tile, block)


def _attend_in_tiles(rows: tuple, pools: tuple, output: Tensor, sizes: _Sizes):
    """Launch the prompts' kernels over all tiles that a batch of this size can have."""
    queries = sizes.TILE // sizes.GROUP  # of a tile
    num_tiles = len(output) // queries + len(rows[0])
    lists = lists_of_tiles(
        *(rows, pools[8:11], sizes.PAGE, num_tiles, queries, sizes.BLOCK)
    )
    _attend_tiles[(num_tiles,)](
        *(*rows, *pools, output, *output.stride()),
        *(*lists, lists[0].shape[1]),
        QUERIES=queries,
        **sizes._asdict(),
        num_warps=8 if sizes.TILE * sizes.WIDTH >= 128 * 128 else 4,
        num_stages=3 if output.element_size() < 4 else 2,
    )


def _attend_in_shares(rows: tuple, pools: tuple, output: Tensor, sizes: _Sizes):
    """Launch the kernels of a batch in which no row has more than one query."""
    num_rows, width = len(rows[0]), rows[0].shape[1] * sizes.PAGE
    shares = min(
        SHARES, triton.cdiv(width, LEAST), max(1, triton.cdiv(PROGRAMS, num_rows))
    )
    shape = num_rows, shares, sizes.GROUP
    best, total = torch.empty(2, *shape, device=output.device)
    sums = torch.empty(*shape, sizes.SIZE, device=output.device)
    _attend_shares[(num_rows, shares)](
        *(*rows, *pools, best, total, sums),
        **sizes._asdict(),
        num_stages=3 if output.element_size() < 4 else 2,
    )
    _join_shares[(num_rows, sizes.GROUP)](
        *(rows[2], rows[3], best, total, sums, output, *output.stride(), shares),
        SIZE=sizes.SIZE,
        WIDTH=sizes.WIDTH,
        BLOCK=sizes.BLOCK,
        AT_ONCE=SHARES_AT_ONCE,
    )


@triton.jit
def _absorb(
    block, best, total, summed, queries, position, place, first, length, table,
    keys, key_page, key_slot, key_number,
    values, value_page, value_slot, value_number,
    until, until_page, until_slot, scale,
    IS_CAUSAL: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the softmax of a tile of queries.

    Returns the new largest logits [TILE], sums of weights [TILE] and weighted sums of
    values [TILE, WIDTH]. Tokens that no query from position `first` on sees count as
    zeros.
    """
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_held = token < length
    page = tl.load(table + token // PAGE, is_held, other=0).to(tl.int64)
    slot = (token % PAGE).to(tl.int64)
    end = tl.load(
        until + page * until_page + slot * until_slot, is_held, other=NEVER_SEEN
    )
    number = tl.arange(0, WIDTH).to(tl.int64)
    is_read = (is_held & (end > first))[:, None] & (number < SIZE)[None, :]
    start = (page * key_page + slot * key_slot)[:, None]
    key = tl.load(keys + start + (number * key_number)[None, :], is_read, other=0.0)
    logits = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    sees = position[:, None] < end[None, :]
    if IS_CAUSAL:
        sees = sees & (token[None, :] <= place[:, None])
    logits = tl.where(sees, logits, float("-inf"))
    largest = tl.maximum(best, tl.max(logits, 1))
    weights = tl.exp2(logits - largest[:, None])
    fade = tl.exp2(best - largest)
    start = (page * value_page + slot * value_slot)[:, None]
    value = tl.load(
        values + start + (number * value_number)[None, :], is_read, other=0.0
    )
    summed = summed * fade[:, None]
    summed = tl.dot(weights.to(value.dtype), value, summed, input_precision="ieee")
    return largest, total * fade + tl.sum(weights, 1), summed


@triton.jit(do_not_specialize=VARYING)
def _attend_tiles(
    tables, table_stride, lengths, query_start, ends,
    keys, key_page, key_slot, key_number,
    values, value_page, value_slot, value_number,
    until, until_page, until_slot, scale,
    query, query_token, query_head, query_number,
    output, output_token, output_head, output_number,
    lists, counts, tile_rows, num_blocks,
    PAGE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the output of one tile of a row's queries."""
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row = tl.load(tile_rows + tile).to(tl.int64)
    if row < 0:
        return
    length = tl.load(lengths + row)
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    begin = (tile - (start // QUERIES + row)).to(tl.int32) * QUERIES
    order = begin + tl.arange(0, TILE) // GROUP
    is_query = (tl.arange(0, TILE) < QUERIES * GROUP) & (order < count)
    behind = tl.minimum(order, count - 1) - count
    position = tl.load(ends + row) + behind
    place = length + behind
    first = tl.load(ends + row) - count + begin
    number = tl.arange(0, WIDTH).to(tl.int64)
    token = (start + order).to(tl.int64)
    head = (tl.arange(0, TILE) % GROUP).to(tl.int64)
    is_read = is_query[:, None] & (number < SIZE)[None, :]
    spot = (token * query_token + head * query_head)[:, None]
    queries = tl.load(query + spot + (number * query_number)[None, :], is_read, 0.0)
    best = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, WIDTH), tl.float32)
    table = tables + row * table_stride
    for index in range(0, tl.load(counts + tile)):
        best, total, summed = _absorb(
            tl.load(lists + tile * num_blocks + index),
            best, total, summed, queries, position, place, first, length, table,
            keys, key_page, key_slot, key_number,
            values, value_page, value_slot, value_number,
            until, until_page, until_slot, scale,
            False, PAGE, SIZE, WIDTH, BLOCK,
        )  # fmt: skip
    reach = length - count + tl.minimum(begin + QUERIES, count)
    for block in range((length - count + begin + 1) // BLOCK, tl.cdiv(reach, BLOCK)):
        best, total, summed = _absorb(
            block, best, total, summed, queries, position, place, first, length, table,
            keys, key_page, key_slot, key_number,
            values, value_page, value_slot, value_number,
            until, until_page, until_slot, scale,
            True, PAGE, SIZE, WIDTH, BLOCK,
        )  # fmt: skip
    spot = (token * output_token + head * output_head)[:, None]
    spot = spot + (number * output_number)[None, :]
    mean = summed / total[:, None]
    tl.store(output + spot, mean.to(output.dtype.element_ty), is_read)


@triton.jit(do_not_specialize=VARYING)
def _attend_shares(
    tables, table_stride, lengths, query_start, ends,
    keys, key_page, key_slot, key_number,
    values, value_page, value_slot, value_number,
    until, until_page, until_slot, scale,
    query, query_token, query_head, query_number,
    best_of, total_of, sums_of,
    PAGE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one share of a row's softmax: its largest logits, weights and sums."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start + row)
    length = tl.load(lengths + row)
    per_share = tl.cdiv(tl.cdiv(length, BLOCK), tl.num_programs(1))
    begin = tl.program_id(1) * per_share
    if (tl.load(query_start + row + 1) == start) | (begin * BLOCK >= length):
        return
    head = tl.arange(0, TILE)
    number = tl.arange(0, WIDTH).to(tl.int64)
    is_read = (head < GROUP)[:, None] & (number < SIZE)[None, :]
    spot = (start.to(tl.int64) * query_token + head.to(tl.int64) * query_head)[:, None]
    queries = tl.load(query + spot + (number * query_number)[None, :], is_read, 0.0)
    best = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    summed = tl.zeros((TILE, WIDTH), tl.float32)
    newest = tl.load(ends + row) - 1
    position = tl.zeros((TILE,), tl.int32) + newest
    for block in range(begin, tl.minimum(begin + per_share, tl.cdiv(length, BLOCK))):
        best, total, summed = _absorb(
            block, best, total, summed, queries, position, position, newest, length,
            tables + row * table_stride,
            keys, key_page, key_slot, key_number,
            values, value_page, value_slot, value_number,
            until, until_page, until_slot, scale,
            False, PAGE, SIZE, WIDTH, BLOCK,
        )  # fmt: skip
    share = (row * tl.num_programs(1) + tl.program_id(1)) * GROUP + head
    tl.store(best_of + share, best, head < GROUP)
    tl.store(total_of + share, total, head < GROUP)
    tl.store(sums_of + share[:, None] * SIZE + number[None, :], summed, is_read)


@triton.jit(do_not_specialize=["lengths", "query_start", "shares"])
def _join_shares(
    lengths, query_start, best_of, total_of, sums_of,
    output, output_token, output_head, output_number, shares,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Put the shares of one query head together and write its output."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start + row)
    if tl.load(query_start + row + 1) == start:
        return
    num_blocks = tl.cdiv(tl.load(lengths + row), BLOCK)
    used = tl.cdiv(num_blocks, tl.cdiv(num_blocks, shares))
    number = tl.arange(0, WIDTH).to(tl.int64)
    best = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    summed = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, used, AT_ONCE):
        share = first + tl.arange(0, AT_ONCE)
        is_used = share < used
        place = (row * shares + share) * tl.num_programs(1) + head
        bests = tl.load(best_of + place, is_used, other=LOWEST)
        totals = tl.load(total_of + place, is_used, other=0.0)
        mask = is_used[:, None] & (number < SIZE)[None, :]
        spot = place[:, None] * SIZE + number[None, :]
        sums = tl.load(sums_of + spot, mask, other=0.0)
        largest = tl.maximum(best, tl.max(bests, 0))
        fade, weight = tl.exp2(best - largest), tl.exp2(bests - largest)
        total = total * fade + tl.sum(totals * weight, 0)
        summed = summed * fade + tl.sum(sums * weight[:, None], 0)
        best = largest
    spot = start.to(tl.int64) * output_token + head * output_head
    mean = (summed / total).to(output.dtype.element_ty)
    tl.store(output + spot + number * output_number, mean, number < SIZE)


def lists_of_tiles(
    rows: tuple, until: tuple, page_size: int, num_tiles: int, queries: int, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """List the blocks of keys that any query of a tile sees.

    Row r's tiles begin at number query_start[r] // queries + r, which leaves room for
    all of them. Blocks that end after a tile's first query are not listed.

    Args:
        rows: tables, stride of their rows, lengths, query_start and ends of
            `until_attention`.
        until: the tensor, and its strides.
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


@triton.jit(do_not_specialize=LISTS_VARYING)
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


@triton.jit(do_not_specialize=LISTS_VARYING)
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
