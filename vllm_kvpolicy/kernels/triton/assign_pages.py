"""Twins of kernels.assign_pages: heads keep their pages, the rest is dealt out.

Pages are shared out by a program per group, its heads in one tile; the shift is found
bit by bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.assign_pages import MOST_TOKENS, PageLists, num_digits

COUNT_TILE = 1024  # tokens that a program looks at at a time


def count_in_pages(mask: Tensor, num_pages: Tensor, block_size: int) -> Tensor:
    counts = torch.empty_like(num_pages, memory_format=torch.contiguous_format)
    rows = mask.contiguous(), num_pages.contiguous(), counts
    _count_in_pages[(counts.numel(),)](
        *rows, block_size, mask.shape[-1], TILE=COUNT_TILE
    )
    return counts


def page_quota(
    tokens: Tensor,
    floors: Tensor,
    caps: Tensor,
    total: Tensor,
    block_size: int,
    most: int = MOST_TOKENS,
    fills: bool = True,
) -> Tensor:
    num_groups, num_heads = tokens.shape
    quota = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    tile = triton.next_power_of_2(num_heads)
    given = (each.contiguous() for each in (tokens, floors, caps, total))
    numbers = num_heads, block_size, num_digits(most)
    sizes = {"TILE": tile, "num_warps": min(8, max(1, tile // 64))}
    _page_quota[(num_groups,)](*given, quota, *numbers, FILLS=fills, **sizes)
    return quota


@triton.jit(do_not_specialize=["num_tokens"])
def _count_in_pages(
    mask, num_pages, counts, block_size, num_tokens, TILE: tl.constexpr
):
    """Count the True entries of one row's first pages."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(num_pages + row) * block_size, num_tokens)
    count = tl.full((), 0, tl.int64)
    for first in range(0, end, TILE):
        entry = first + tl.arange(0, TILE)
        flag = tl.load(mask + row * num_tokens + entry, mask=entry < end, other=0)
        count += tl.sum(flag.to(tl.int32))
    tl.store(counts + row, count)


@triton.jit(do_not_specialize=["digits"])
def _page_quota(
    tokens, floors, caps, total, quota, num_heads, block_size, digits,
    FILLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Share the pages of one group; the shift has `digits` digits to base 16."""
    group = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TILE)
    is_head = head < num_heads
    entry = group * num_heads + head
    wanted = tl.load(tokens + entry, mask=is_head, other=0)
    # What is no head gets nothing.
    floor = tl.load(floors + entry, mask=is_head, other=0)
    cap = tl.load(caps + entry, mask=is_head, other=0)
    pages = tl.load(total + group)
    if not FILLS:
        asked = tl.sum(tl.where(is_head, (wanted + block_size - 1) // block_size, 0))
        pages = tl.minimum(pages, tl.maximum(asked, 1))
    shift = -tl.max(tl.where(is_head, wanted, -(2**62)))
    step = tl.full((), 1, tl.int64) << (4 * digits - 1)
    while step > 0:
        reached = _pages(wanted, shift + step, block_size, floor, cap)
        shift = tl.where(tl.sum(reached) <= pages, shift + step, shift)
        step //= 2
    given = _pages(wanted, shift, block_size, floor, cap)
    claims = _pages(wanted, shift + 1, block_size, floor, cap) - given
    left = pages - tl.sum(given)
    given += tl.where(tl.cumsum(claims) <= left, claims, 0)
    tl.store(quota + entry, given, mask=is_head)


@triton.jit
def _pages(tokens, shift, block_size, floor, cap):
    """Return the pages that shifted tokens fill; floors are not negative."""
    return tl.minimum(tl.maximum((tokens + shift) // block_size, floor), cap)


PAGES = 64  # of a head that a program looks up at a time, and superblocks beside them
CELLS = 1024  # of an arena that a program looks at at a time


def assign_pages(
    held: Tensor,
    num_held: Tensor,
    dest: Tensor,
    quota: Tensor,
    num_blocks: int,
    num_kv_heads: int,
) -> PageLists:
    (num_events, num_dest), num_heads = dest.shape, held.shape[1]
    first = dest.new_empty(num_events, num_heads + 1)
    pages = dest.new_empty(num_events, num_heads * num_dest)
    unmoved = torch.empty_like(pages, dtype=torch.bool)
    taken = torch.zeros_like(unmoved)
    sizes = (num_dest, num_blocks, num_kv_heads, num_heads)
    heads = triton.next_power_of_2(num_heads)
    owned = held.contiguous(), num_held.contiguous()
    wanted = dest.contiguous(), quota.contiguous()
    made, width = (first, pages, unmoved, taken), held.shape[-1]
    _keep_own[(num_events, num_heads)](
        *owned, *wanted, *made, width, *sizes, HEADS=heads, TILE=PAGES
    )
    free = torch.empty_like(pages)
    _deal_rest[(num_events,)](
        *wanted, taken, free, pages, unmoved, *sizes, HEADS=heads, TILE=CELLS
    )
    return PageLists(first, pages, unmoved)


@triton.jit(do_not_specialize=["width", "num_dest"])
def _keep_own(
    held, num_held, dest, quota, first, pages, unmoved, taken,
    width, num_dest, num_blocks, num_kv_heads, num_heads,
    HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Let one head keep its first pages that are in the arena.

    Writes `first` and, in the head's list, `pages`, -1 where a page is wanted, and
    `unmoved`; sets `taken` [E, n * D] in the cells of pages that stay.
    """
    event = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    others = tl.arange(0, HEADS)
    shares = quota + event * num_heads + others
    share = tl.load(shares, mask=others < num_heads, other=0)
    total = tl.sum(share)
    start = tl.sum(tl.where(others < head, share, 0))
    wanted = tl.sum(tl.where(others == head, share, 0))
    tl.store(first + event * (num_heads + 1) + head, start)
    if head == num_heads - 1:
        tl.store(first + (event + 1) * (num_heads + 1) - 1, total)
    used = (total + num_heads - 1) // num_heads * num_heads
    row = event * num_heads + head
    count = tl.load(num_held + row)
    arena = event * num_heads * num_dest
    pages += arena + start
    unmoved += arena + start
    taken += arena
    num_kept = tl.full((), 0, tl.int64)
    for begin in range(0, count, TILE):
        place = begin + tl.arange(0, TILE)
        page = tl.load(held + row * width + place, mask=place < count, other=0)
        block = page // num_kv_heads % num_blocks
        found = tl.full((TILE,), -1, tl.int64)
        for other in range(0, num_dest, TILE):
            number = other + tl.arange(0, TILE)
            listed = dest + event * num_dest + number
            owned = tl.load(listed, mask=number < num_dest, other=-1)
            is_it = block[:, None] == owned[None, :]
            found = tl.maximum(found, tl.max(tl.where(is_it, number[None, :], -1), 1))
        stock = page // (num_kv_heads * num_blocks) * num_kv_heads + page % num_kv_heads
        cell = found * num_heads + stock
        stays = (place < count) & (found >= 0) & (cell < used)
        rank = num_kept + tl.cumsum(stays.to(tl.int32)) - 1
        stays &= rank < wanted
        tl.store(pages + rank, page, mask=stays)
        tl.store(unmoved + rank, rank == place, mask=stays)
        tl.store(taken + cell, stays, mask=stays)
        num_kept += tl.sum(stays.to(tl.int32))
    for begin in range(num_kept, wanted, TILE):
        rank = begin + tl.arange(0, TILE)
        is_missing = rank < wanted
        tl.store(pages + rank, tl.full((TILE,), -1, tl.int64), mask=is_missing)
        tl.store(unmoved + rank, rank < 0, mask=is_missing)


@triton.jit(do_not_specialize=["num_dest"])
def _deal_rest(
    dest, quota, taken, free, pages, unmoved,
    num_dest, num_blocks, num_kv_heads, num_heads,
    HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill the shortfalls of one event's heads with the pages that none keeps.

    They are listed in `free` [E, n * D] int64 on the way. Behind the lists, `pages` and
    `unmoved` are cleared.
    """
    event = tl.program_id(0).to(tl.int64)
    size = num_heads * num_dest
    base = event * size
    others = tl.arange(0, HEADS)
    shares = quota + event * num_heads + others
    total = tl.sum(tl.load(shares, mask=others < num_heads, other=0))
    count = tl.full((), 0, tl.int64)
    for begin in range(0, size, TILE):
        cell = begin + tl.arange(0, TILE)
        is_cell = cell < size
        is_free = is_cell & (tl.load(taken + base + cell, mask=is_cell, other=1) == 0)
        listed = dest + event * num_dest + cell // num_heads
        block = tl.load(listed, mask=is_cell, other=0)
        head = cell % num_heads
        stock = head // num_kv_heads * num_blocks * num_kv_heads + head % num_kv_heads
        rank = count + tl.cumsum(is_free.to(tl.int32)) - 1
        tl.store(free + base + rank, block * num_kv_heads + stock, mask=is_free)
        count += tl.sum(is_free.to(tl.int32))
    # What other threads have listed is read from here on.
    tl.debug_barrier()
    count = tl.full((), 0, tl.int64)
    for begin in range(0, size, TILE):
        entry = begin + tl.arange(0, TILE)
        is_listed = entry < total
        page = tl.load(pages + base + entry, mask=is_listed, other=0)
        lacks = is_listed & (page < 0)
        rank = count + tl.cumsum(lacks.to(tl.int32)) - 1
        page = tl.where(lacks, tl.load(free + base + rank, mask=lacks, other=0), page)
        tl.store(pages + base + entry, page, mask=entry < size)
        behind = (entry >= total) & (entry < size)
        tl.store(unmoved + base + entry, entry < 0, mask=behind)
        count += tl.sum(lacks.to(tl.int32))
