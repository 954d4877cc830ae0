"""Twins of kernels.ranking: selections of rows, and lists of what a mask holds."""

import math

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.triton.radix_select import launch_sizes, mark_best


def fill_next_best(
    keep: torch.Tensor,
    score: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> torch.Tensor:
    """Add the best tokens that are not kept yet until a row keeps `target`.

    Exact; see `kernels.ranking.fill_next_best_ref`. Leading axes may be any.
    """
    return _select(keep, score, None, valid, target)


def top_k_mask(
    score: torch.Tensor,
    must_keep: torch.Tensor,
    valid: torch.Tensor,
    budget: torch.Tensor | int,
) -> torch.Tensor:
    """Keep the must-keep tokens and the best of the others, `budget` in all.

    Exact; see `kernels.ranking.top_k_mask_ref`. Leading axes may be any.
    """
    return _select(must_keep & valid, score, None, valid, budget)


def resize(
    keep: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> torch.Tensor:
    """Fill up or trim a selection: must-keep tokens first, then kept ones, then others.

    Exact; see `kernels.ranking.resize_ref`.
    """
    return _select(keep, score, must_keep, valid, target)


def ascending_indices(mask: torch.Tensor, count: int) -> torch.Tensor:
    """List the positions of a mask's True entries, oldest first.

    Exact; see `kernels.ranking.ascending_indices_ref`. Leading axes may be any.
    """
    num_rows, num_tokens = math.prod(mask.shape[:-1]), mask.shape[-1]
    listed = mask.new_empty((*mask.shape[:-1], count), dtype=torch.int64)
    mask = mask.contiguous()
    sizes = launch_sizes(num_tokens)
    num_tiles = triton.cdiv(num_tokens, sizes["TILE"])
    grid = (num_rows, max(num_tiles, triton.cdiv(count, sizes["TILE"])))
    if listed.numel() == 0:
        return listed
    counts = None
    if num_tiles > 1:
        counts = mask.new_empty((num_rows, num_tiles), dtype=torch.int32)
        _count[(num_rows, num_tiles)](mask, counts, num_tokens, num_tiles, **sizes)
    _list[grid](
        mask,
        counts,
        listed,
        num_tokens,
        num_tiles,
        count,
        TILES=triton.next_power_of_2(num_tiles),
        **sizes,
    )
    return listed


def _select(
    keep: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor | None,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> torch.Tensor:
    """Grade tokens, then choose among those of the grade that `target` cuts through.

    Without `must_keep` nothing that is kept is dropped.
    """
    chosen = torch.empty_like(keep, memory_format=torch.contiguous_format)
    if keep.numel() == 0:
        return chosen
    num_rows, num_tokens = math.prod(keep.shape[:-1]), keep.shape[-1]
    group = torch.empty_like(chosen, dtype=torch.uint8)
    quota = chosen.new_empty((num_rows, 1), dtype=torch.int32)
    if isinstance(target, torch.Tensor):
        target = target.expand(keep.shape[:-1]).contiguous()
    _grade[(num_rows,)](
        keep.contiguous(),
        None if must_keep is None else must_keep.contiguous(),
        valid.contiguous(),
        target,
        chosen,
        group,
        quota,
        num_tokens,
        HAS_TARGETS=isinstance(target, torch.Tensor),
        **launch_sizes(num_tokens),
    )
    rows = (num_rows, num_tokens)
    score = score.contiguous().view(rows)
    mark_best(score, group.view(rows), quota, None, chosen.view(rows))
    return chosen


@triton.jit(do_not_specialize=["target", "num_tokens"])
def _grade(
    keep,  # [R, T] bool
    must_keep,  # [R, T] bool, or None: nothing that is kept is dropped
    valid,  # [R, T] bool
    target,  # [R] int64, or a number for all rows
    chosen,  # [R, T] bool: whether the token is in, whatever its score
    group,  # [R, T] uint8: 0 where its score decides, else 1
    quota,  # [R] int32: how many of group 0 get in
    num_tokens,
    HAS_TARGETS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sort one row's tokens into those in, those out and those to choose from."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_tokens
    if HAS_TARGETS:
        target = tl.load(target + row)
    room = tl.minimum(target, num_tokens).to(tl.int32)
    num_must = tl.full((), 0, tl.int32)
    num_kept = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, TILE):
        position = first + tl.arange(0, TILE)
        grade = _grades(keep, must_keep, valid, start, position, num_tokens)
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
        grade = _grades(keep, must_keep, valid, start, position, num_tokens)
        inside = position < num_tokens
        tl.store(chosen + start + position, grade > cut, mask=inside)
        tl.store(group + start + position, (grade != cut).to(tl.uint8), mask=inside)


@triton.jit
def _grades(keep, must_keep, valid, start, position, num_tokens):
    """Grade tokens: 2 must keep, 1 kept, 0 others, -1 not to be chosen."""
    inside = position < num_tokens
    is_valid = tl.load(valid + start + position, mask=inside, other=0)
    is_kept = tl.load(keep + start + position, mask=inside, other=0)
    grade = tl.where(is_kept, 1, 0)
    if must_keep is None:
        is_valid |= is_kept
    else:
        must = tl.load(must_keep + start + position, mask=inside, other=0)
        grade = tl.where(must, 2, grade)
    return tl.where(is_valid, grade, -1)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _count(
    mask,  # [R, T] bool
    counts,  # [R, tiles] int32
    num_tokens,
    num_tiles,
    TILE: tl.constexpr,
):
    """Count the True entries of one tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tile * TILE + tl.arange(0, TILE)
    flag = tl.load(
        mask + row * num_tokens + position, mask=position < num_tokens, other=0
    )
    tl.store(counts + row * num_tiles + tile, tl.sum(flag.to(tl.int32)))


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "count"])
def _list(
    mask,  # [R, T] bool
    counts,  # [R, tiles] int32, or None where there is one tile
    listed,  # [R, count] int64
    num_tokens,
    num_tiles,
    count,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """List one tile's True entries, and the entries of the list that stay empty."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tile * TILE + tl.arange(0, TILE)
    flag = tl.load(
        mask + row * num_tokens + position, mask=position < num_tokens, other=0
    )
    slot = tl.cumsum(flag.to(tl.int32)) - 1
    if counts is None:
        total = tl.sum(flag.to(tl.int32))
    else:
        other = tl.arange(0, TILES)
        found = tl.load(
            counts + row * num_tiles + other, mask=other < num_tiles, other=0
        )
        slot += tl.sum(tl.where(other < tile, found, 0))
        total = tl.sum(found)
    listed += row * count
    tl.store(listed + slot, position.to(tl.int64), mask=flag & (slot < count))
    # Slots are numbered as positions are here: each program looks at some of them.
    empty = (position >= total) & (position < count)
    tl.store(listed + position, tl.full((TILE,), -1, tl.int64), mask=empty)
