"""Twins of kernels.ranking: selections of rows, and lists of what a mask holds."""

import math

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.triton.radix_select import launch_sizes, mark_best

MASK_TILE = 1024  # tokens that a program looks at at a time


def must_keep_tokens(
    num_pages: torch.Tensor,
    num_local: torch.Tensor,
    sinks: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark the tokens that an event keeps in any case: sinks and local ones."""
    num_events, num_heads = num_pages.shape
    lengths = num_local.new_empty(num_events, num_heads)
    must_keep = lengths.new_empty((*lengths.shape, num_tokens), dtype=torch.bool)
    grid = (lengths.numel(), triton.cdiv(num_tokens, MASK_TILE))
    _must_keep[grid](
        num_pages,
        *num_pages.stride(),
        num_local,
        sinks,
        lengths,
        must_keep,
        num_heads,
        block_size,
        num_tokens,
        TILE=MASK_TILE,
    )
    return lengths, must_keep


def limit_must_keep(must_keep: torch.Tensor, budget: int) -> torch.Tensor:
    """Shrink a must-keep set that exceeds the budget: recent tokens go before sinks."""
    limited = torch.empty_like(must_keep, memory_format=torch.contiguous_format)
    num_tokens = must_keep.shape[-1]
    if limited.numel() > 0:
        _limit_must_keep[(limited.numel() // num_tokens,)](
            must_keep.contiguous(), limited, budget, num_tokens, TILE=MASK_TILE
        )
    return limited


def fill_next_best(
    keep: torch.Tensor,
    score: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> torch.Tensor:
    """Add the best tokens that are not kept yet until a row keeps `target`."""
    return _select(keep, score, None, valid, target, keeps_all=True)


def top_k_mask(
    score: torch.Tensor,
    must_keep: torch.Tensor,
    valid: torch.Tensor,
    budget: torch.Tensor | int,
) -> torch.Tensor:
    """Keep the must-keep tokens and the best of the others, `budget` in all."""
    return _select(must_keep, score, None, valid, budget)


def resize(
    keep: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor,
    num_pages: torch.Tensor,
    quota: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Fill up or trim a selection of a row's first pages to whole pages."""
    return _select(keep, score, must_keep, num_pages, quota, block_size)


def _select(
    keep: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor | None,
    valid: torch.Tensor,
    target: torch.Tensor | int,
    unit: int = 1,
    keeps_all: bool = False,
) -> torch.Tensor:
    """Grade tokens, then choose among those of the grade that `target` cuts through.

    Without `must_keep` nothing that is kept is dropped.

    Args:
        keep, score, must_keep: see `resize`.
        valid: a mask, or how many units of a row's first tokens are valid.
        target: units.
        unit: tokens.
        keeps_all: what is kept stays although it is not valid.
    """
    chosen = torch.empty_like(keep, memory_format=torch.contiguous_format)
    if keep.numel() == 0:
        return chosen
    num_rows, num_tokens = math.prod(keep.shape[:-1]), keep.shape[-1]
    group = torch.empty_like(chosen, dtype=torch.uint8)
    quota = chosen.new_empty((num_rows, 1), dtype=torch.int32)
    if isinstance(target, torch.Tensor):
        target = target.expand(keep.shape[:-1]).contiguous()
    has_mask = valid.dtype == torch.bool
    _grade[(num_rows,)](
        keep.contiguous(),
        None if must_keep is None else must_keep.contiguous(),
        valid.contiguous() if has_mask else None,
        None if has_mask else valid.contiguous(),
        target,
        unit,
        chosen,
        group,
        quota,
        num_tokens,
        HAS_TARGETS=isinstance(target, torch.Tensor),
        KEEPS_ALL=keeps_all,
        **launch_sizes(num_tokens),
    )
    rows = (num_rows, num_tokens)
    score = score.contiguous().view(rows)
    mark_best(score, group.view(rows), quota, None, chosen.view(rows))
    return chosen


@triton.jit(do_not_specialize=["target", "unit", "num_tokens"])
def _grade(
    keep,  # [R, T] bool
    must_keep,  # [R, T] bool, or None: nothing that is kept is dropped
    valid,  # [R, T] bool, or None
    held,  # [R] int64, units of a row's first tokens that are valid, or None
    target,  # [R] int64, or a number for all rows; units
    unit,  # tokens
    chosen,  # [R, T] bool: whether the token is in, whatever its score
    group,  # [R, T] uint8: 0 where its score decides, else 1
    quota,  # [R] int32: how many of group 0 get in
    num_tokens,
    HAS_TARGETS: tl.constexpr,
    KEEPS_ALL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sort one row's tokens into those in, those out and those to choose from."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_tokens
    if HAS_TARGETS:
        target = tl.load(target + row)
    room = tl.minimum(target * unit, num_tokens).to(tl.int32)
    if held is None:
        num_held = num_tokens
    else:
        num_held = tl.minimum(tl.load(held + row) * unit, num_tokens).to(tl.int32)
    num_must = tl.full((), 0, tl.int32)
    num_kept = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, TILE):
        position = first + tl.arange(0, TILE)
        grade = _grades(
            keep, must_keep, valid, start, position, num_tokens, num_held, KEEPS_ALL
        )
        num_must += tl.sum((grade == 2).to(tl.int32))
        num_kept += tl.sum((grade == 1).to(tl.int32))
    if must_keep is None:
        cut = num_must * 0
        room -= num_kept
    else:
        cut = tl.where(room <= num_must, 2, tl.where(room <= num_must + num_kept, 1, 0))
        room -= tl.where(cut < 2, num_must, 0) + tl.where(cut < 1, num_kept, 0)
    tl.store(quota + row, room)
    for first in range(0, num_tokens, TILE):
        position = first + tl.arange(0, TILE)
        grade = _grades(
            keep, must_keep, valid, start, position, num_tokens, num_held, KEEPS_ALL
        )
        inside = position < num_tokens
        tl.store(chosen + start + position, grade > cut, mask=inside)
        tl.store(group + start + position, (grade != cut).to(tl.uint8), mask=inside)


@triton.jit
def _grades(
    keep,
    must_keep,
    valid,
    start,
    position,
    num_tokens,
    num_held,
    KEEPS_ALL: tl.constexpr,
):
    """Grade tokens: 2 must keep, 1 kept, 0 others, -1 not to be chosen."""
    inside = position < num_tokens
    is_kept = tl.load(keep + start + position, mask=inside, other=0)
    if valid is None:
        is_valid = position < num_held
    else:
        is_valid = tl.load(valid + start + position, mask=inside, other=0)
    grade = tl.where(is_kept, 1, 0)
    if KEEPS_ALL:
        is_valid |= is_kept
    if must_keep is not None:
        must = tl.load(must_keep + start + position, mask=inside, other=0)
        grade = tl.where(must, 2, grade)
    return tl.where(is_valid, grade, -1)


@triton.jit(do_not_specialize=["head_stride", "num_tokens"])
def _must_keep(
    num_pages,  # [E, n] int64
    event_stride,
    head_stride,
    num_local,  # [E] int64
    sinks,  # [E] int64
    lengths,  # [E, n] int64, written
    must_keep,  # [E, n, T] bool, written
    num_heads,
    block_size,
    num_tokens,
    TILE: tl.constexpr,
):
    """Mark a tile of one head's tokens."""
    row = tl.program_id(0).to(tl.int64)
    event, head = row // num_heads, row % num_heads
    pages = tl.load(num_pages + event * event_stride + head * head_stride)
    num_global = pages * block_size
    length = num_global + tl.load(num_local + event)
    if tl.program_id(1) == 0:
        tl.store(lengths + row, length)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    stays = (token >= num_global) & (token < length)
    stays |= token < tl.load(sinks + event)
    tl.store(must_keep + row * num_tokens + token, stays, mask=token < num_tokens)


@triton.jit(do_not_specialize=["budget", "num_tokens"])
def _limit_must_keep(
    must_keep,  # [R, T] bool
    limited,  # [R, T] bool, written
    budget,
    num_tokens,
    TILE: tl.constexpr,
):
    """Keep a row's first sinks, and of the others the newest."""
    row = tl.program_id(0).to(tl.int64)
    must_keep += row * num_tokens
    limited += row * num_tokens
    num_must = tl.full((), 0, tl.int32)
    num_sinks = tl.minimum(budget, num_tokens)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        flag = tl.load(must_keep + token, mask=token < num_tokens, other=1) != 0
        num_must += tl.sum((flag & (token < num_tokens)).to(tl.int32))
        num_sinks = tl.minimum(num_sinks, tl.min(tl.where(flag, num_tokens, token)))
    # What is neither a sink nor among the newest for whom there is room goes.
    num_gone = tl.maximum(num_must - budget, 0)
    number = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        flag = tl.load(must_keep + token, mask=token < num_tokens, other=0) != 0
        other = flag & (token >= num_sinks)
        rank = number + tl.cumsum(other.to(tl.int32))
        stays = (flag & (token < num_sinks)) | (other & (rank > num_gone))
        tl.store(limited + token, stays, mask=token < num_tokens)
        number += tl.sum(other.to(tl.int32))
