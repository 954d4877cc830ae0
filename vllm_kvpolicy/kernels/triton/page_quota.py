"""Twins of kernels.page_quota: shared by a program per group, its heads in one tile.

Source: kernels.page_quota. Deviations: the shift is found bit by bit.
"""

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.page_quota import MOST_TOKENS, num_digits

COUNT_TILE = 1024  # tokens that a program looks at at a time


def count_in_pages(
    mask: torch.Tensor, num_pages: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Count the True entries in each row's first pages."""
    counts = torch.empty_like(num_pages, memory_format=torch.contiguous_format)
    _count_in_pages[(counts.numel(),)](
        mask.contiguous(),
        num_pages.contiguous(),
        counts,
        block_size,
        mask.shape[-1],
        TILE=COUNT_TILE,
    )
    return counts


def page_quota(
    tokens: torch.Tensor,
    floors: torch.Tensor,
    caps: torch.Tensor,
    total: torch.Tensor,
    block_size: int,
    most: int = MOST_TOKENS,
    fills: bool = True,
) -> torch.Tensor:
    """Share `total` pages among the n heads of each group."""
    num_groups, num_heads = tokens.shape
    quota = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    tile = triton.next_power_of_2(num_heads)
    _page_quota[(num_groups,)](
        tokens.contiguous(),
        floors.contiguous(),
        caps.contiguous(),
        total.contiguous(),
        quota,
        num_heads,
        block_size,
        num_digits(most),
        FILLS=fills,
        TILE=tile,
        num_warps=min(8, max(1, tile // 64)),
    )
    return quota


@triton.jit(do_not_specialize=["num_tokens"])
def _count_in_pages(
    mask,  # [R, T] bool
    num_pages,  # [R] int64
    counts,  # [R] int64, written
    block_size,
    num_tokens,
    TILE: tl.constexpr,
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
    tokens,  # [G, n] int64
    floors,  # [G, n] int64
    caps,  # [G, n] int64
    total,  # [G] int64
    quota,  # [G, n] int64, written
    num_heads,
    block_size,
    digits,  # of the shift, to base 16
    FILLS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Share the pages of one group."""
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
