"""Twins in Triton of kernels.page_bounds: bounds by page, scores by tile of a row.

Sums of scores are added up in another order than the reference's. The best pages of a
row are found without sorting, by radix selection; see `triton.ranking`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.page_bounds import LOWEST
from vllm_kvpolicy.kernels.triton.ranking import count_from, find_cut, load_tile

SLOTS = 16  # tokens of a page at a time
NUMBERS = 4096  # of a tile of pages, two of which are held at once
NOTHING = tl.constexpr(LOWEST)
COLUMNS = 2048  # of a row at a time, where the best are chosen


def page_bounds(bounds: Tensor, keys: Tensor, pages: Tensor) -> None:
    if not len(pages):
        return
    _, page_size, size = keys.shape
    sizes = {"SIZE": size, "WIDTH": triton.next_power_of_2(size), "SLOTS": SLOTS}
    strides = bounds.stride(0), *keys.stride()
    _page_bounds[(len(pages),)](
        bounds, keys, pages.contiguous(), *strides, page_size, **sizes
    )


def page_scores(
    queries: Tensor, pages: Tensor, counts: Tensor, bounds: Tensor
) -> Tensor:
    """Rows of `pages` are contiguous."""
    (num_rows, group, size), num_columns = queries.shape, pages.shape[1]
    scores = queries.new_empty(num_rows, num_columns, dtype=torch.float32)
    width = triton.next_power_of_2(size)
    tile = max(1, min(64, NUMBERS // width))
    if not scores.numel():
        return scores
    inputs = queries.contiguous(), pages, counts.contiguous(), bounds
    strides = pages.stride(0), bounds.stride(0)
    sizes = {"SIZE": size, "WIDTH": width, "TILE": tile, "GROUP": group}
    _page_scores[(num_rows, triton.cdiv(num_columns, tile))](
        *inputs, scores, *strides, num_columns, **sizes
    )
    return scores


def best_pages(
    tables: Tensor, scores: Tensor, num_global: Tensor, num_read: Tensor
) -> Tensor:
    num_rows, num_columns = tables.shape
    read = torch.empty_like(tables, memory_format=torch.contiguous_format)
    if read.numel():
        rows = (each.contiguous() for each in (scores, num_global, num_read))
        sizes = {"TILE": COLUMNS, "num_warps": COLUMNS // 256}
        _best_pages[(num_rows,)](
            tables, *rows, read, tables.stride(0), num_columns, **sizes
        )
    return read


@triton.jit(do_not_specialize=["page_size"])
def _page_bounds(
    bounds, keys, pages, side: tl.int64,
    page_stride: tl.int64, slot_stride: tl.int64, number_stride: tl.int64, page_size,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    page = tl.load(pages + tl.program_id(0))
    number = tl.arange(0, WIDTH)
    is_number = number < SIZE
    low = tl.full((WIDTH,), float("inf"), tl.float32)
    high = tl.full((WIDTH,), float("-inf"), tl.float32)
    for begin in range(0, page_size, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        mask = (slot < page_size)[:, None] & is_number[None, :]
        place = slot.to(tl.int64)[:, None] * slot_stride
        place += number.to(tl.int64)[None, :] * number_stride
        start = keys + page * page_stride
        smallest = tl.load(start + place, mask, other=float("inf")).to(tl.float32)
        largest = tl.load(start + place, mask, other=float("-inf")).to(tl.float32)
        low = tl.minimum(low, tl.min(smallest, 0))
        high = tl.maximum(high, tl.max(largest, 0))
    target = bounds + page * SIZE + number
    tl.store(target, low, is_number)
    tl.store(target + side, high, is_number)


@triton.jit(do_not_specialize=["num_columns"])
def _page_scores(
    queries, pages, counts, bounds, scores,
    pages_row: tl.int64, side: tl.int64, num_columns,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < num_columns
    is_scored = is_column & (column < tl.load(counts + row))
    page = tl.load(pages + row * pages_row + column, is_scored, other=0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    is_number = number < SIZE
    mask = is_scored[:, None] & is_number[None, :]
    place = bounds + page[:, None] * SIZE + number[None, :]
    low = tl.load(place, mask, other=0.0).to(tl.float32)
    high = tl.load(place + side, mask, other=0.0).to(tl.float32)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    for head in range(GROUP):
        along = queries + (row * GROUP + head) * SIZE + number
        query = tl.load(along, is_number, other=0.0).to(tl.float32)[None, :]
        best = tl.maximum(best, tl.sum(tl.where(query > 0, high, low) * query, 1))
    score = tl.where(is_scored, best, NOTHING)
    tl.store(scores + row * num_columns + column, score, is_column)


@triton.jit(do_not_specialize=["tables_row", "num_columns"])
def _best_pages(
    tables, scores, num_global, num_read, read, tables_row: tl.int64, num_columns,
    TILE: tl.constexpr,
):  # fmt: skip
    """Choose pages of one row: find the lowest score that is read, then list pages."""
    row = tl.program_id(0).to(tl.int64)
    end, quota = tl.load(num_global + row).to(tl.int32), tl.load(num_read + row)
    quota = quota.to(tl.int32)
    tables += row * tables_row
    scores += row * num_columns
    read += row * num_columns
    key, among = load_tile(scores, None, 0, tl.arange(0, TILE), end)
    cut, _ = find_cut(key, among, quota, scores, None, 0, 0, end, TILE, True)
    # Pages on the cut are read from the first one on, until the quota is reached.
    rest = (scores, None, 0, 0, end)
    left = quota - count_from(cut + 1, key, among, rest, TILE, True)
    last = quota + num_columns - end
    placed = tl.full((), 0, tl.int32)
    for first in range(0, num_columns, TILE):
        column = first + tl.arange(0, TILE)
        key, among = load_tile(scores, None, 0, column, end)
        ties = among & (key == cut)
        number = tl.cumsum(ties.to(tl.int32))
        is_best = (among & (key > cut)) | (ties & (number <= left))
        is_read = is_best | ((column >= end) & (column < num_columns))
        page = tl.load(tables + column, is_read, other=0)
        place = placed + tl.cumsum(is_read.to(tl.int32)) - 1
        tl.store(read + place, page, is_read)
        nobody = (column >= last) & (column < num_columns)
        tl.store(read + column, tl.zeros_like(page), nobody)
        left -= tl.sum(ties.to(tl.int32))
        placed += tl.sum(is_read.to(tl.int32))
