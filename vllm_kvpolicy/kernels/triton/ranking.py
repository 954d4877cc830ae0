"""Twins of kernels.ranking: the best tokens of a row are found without sorting it.

The quota-th best score is found bit by bit, from the highest one down: a bit is set if
enough tokens are at least as good. Sums of flags are all that it takes, so the result
does not depend on their order. Of equal scores the later position wins.

Source: radix selection (Alabi et al., Fast k-selection algorithms for graphics
processing units, 2012). Deviations: one bit per pass, in registers.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILE = 4096  # tokens that a program holds in registers
GROUP_TILE = 512  # the same where programs look at one group of many


def mark_best(
    score: Tensor,
    group: Tensor,
    quotas: Tensor,
    ranges: tuple[Tensor, Tensor] | None,
    marked: Tensor,
) -> None:
    """Mark the best tokens of each group, as many as its quota.

    Args:
        score: [R, T] floating point, contiguous; NaN allowed.
        group: [R, T] integers, contiguous; those outside 0..S-1 are not looked at.
        quotas: [R, S] integers, contiguous; tokens, none where 0 or below.
        ranges: [R, S] int32 each, contiguous: T minus a group's first position, and
            one past its last. None where groups may lie anywhere.
        marked: [R, T] bool, contiguous; True is written, never False.
    """
    (num_rows, num_tokens), num_groups = score.shape, quotas.shape[-1]
    max_tile = MAX_TILE if ranges is None else GROUP_TILE
    sizes = launch_sizes(num_tokens, max_tile, per_thread=16)
    sizes["HAS_MORE"] = num_tokens > sizes["TILE"]
    rows = score, group, quotas, *(ranges or (None, None)), marked
    _mark_best[(num_rows, num_groups)](*rows, num_tokens, num_groups, **sizes)


def launch_sizes(
    num_tokens: int, max_tile: int = MAX_TILE, per_thread: int = 8
) -> dict[str, int]:
    """Choose what a program that walks a row holds at a time.

    Args:
        num_tokens: of the row.
        max_tile: tokens, a power of two.
        per_thread: tokens.

    Returns:
        TILE, a power of two, and num_warps.
    """
    tile = max(128, min(triton.next_power_of_2(num_tokens), max_tile))
    return {"TILE": tile, "num_warps": min(32, max(1, tile // (32 * per_thread)))}


@triton.jit(do_not_specialize=["ends", "num_tokens", "num_groups"])
def _mark_best(
    score, group, quotas, begins, ends, marked, num_tokens, num_groups,
    TILE: tl.constexpr, HAS_MORE: tl.constexpr,
):  # fmt: skip
    """Search one group of one row; its first tile stays in registers.

    See `mark_best`; `begins` and `ends` are its ranges.
    """
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.program_id(1)
    entry = row * num_groups + wanted
    quota = tl.load(quotas + entry).to(tl.int32)
    if quota <= 0:
        return
    if begins is None:
        begin = 0
        end = num_tokens
    else:
        begin = num_tokens - tl.load(begins + entry)
        end = tl.load(ends + entry)
    score += row * num_tokens
    group += row * num_tokens
    marked += row * num_tokens
    position = begin + tl.arange(0, TILE)
    key, among = load_tile(score, group, wanted, position, end)
    cut, passed = find_cut(
        key, among, quota, score, group, wanted, begin, end, TILE, HAS_MORE
    )
    best, passed = pick(key, among, cut, passed)
    tl.store(marked + position, best, mask=best)
    if HAS_MORE:
        for first in range(begin + TILE, end, TILE):
            position = first + tl.arange(0, TILE)
            key, among = load_tile(score, group, wanted, position, end)
            best, passed = pick(key, among, cut, passed)
            tl.store(marked + position, best, mask=best)


@triton.jit
def load_tile(score, group, wanted, position, end):
    """Load keys, and whether tokens are in the wanted group; all are without groups."""
    among = position < end
    key = order_key(tl.load(score + position, mask=among, other=0.0))
    if group is not None:
        among &= tl.load(group + position, mask=among, other=0) == wanted
    return key, among


@triton.jit
def order_key(score):
    """Turn scores into integers of the same order: int32, or int64 for float64.

    NaN counts as minus infinity and -0.0 as 0.0. All of it is done on bits, which no
    option of the compiler for floating point can change.
    """
    is_double: tl.constexpr = score.dtype == tl.float64
    infinity: tl.constexpr = 0x7FF0000000000000 if is_double else 0x7F800000
    magnitude: tl.constexpr = 0x7FFFFFFFFFFFFFFF if is_double else 0x7FFFFFFF
    if is_double:
        bits = score.to(tl.int64, bitcast=True)
        sign = bits >> 63
    else:
        bits = score.to(tl.float32).to(tl.int32, bitcast=True)
        sign = bits >> 31
    key = bits ^ (sign & magnitude)
    key = tl.where(key == -1, 0, key)  # the bits of -0.0
    return tl.where((bits & magnitude) > infinity, ~infinity, key)


@triton.jit
def find_cut(
    key, among, quota, score, group, wanted, begin, end,
    TILE: tl.constexpr, HAS_MORE: tl.constexpr,
):  # fmt: skip
    """Find the key of the last token that gets in.

    Args:
        key: [TILE] signed integers, of the first tile.
        among: [TILE] bool, tokens to choose from.
        quota: how many of them.
        score, group, wanted, begin, end: as `_mark_best` has them, for further tiles;
            not looked at unless HAS_MORE.

    Returns:
        A number that `quota` keys reach, or more where keys are equal, and how many
        tokens with that very key, from the first position on, stay out.
    """
    bits: tl.constexpr = key.dtype.primitive_bitwidth
    rest = (score, group, wanted, begin, end)
    one = tl.full((), 1, key.dtype)
    bit = tl.full((), bits, tl.int32)
    cut = one << (bits - 1)  # the lowest number
    reached = count_from(cut, key, among, rest, TILE, HAS_MORE)
    # Where exactly the quota is reached, lower bits change nothing.
    while (bit > 0) & (reached > quota):
        bit -= 1
        trial = cut ^ (one << bit)
        count = count_from(trial, key, among, rest, TILE, HAS_MORE)
        cut = tl.where(count >= quota, trial, cut)
        reached = tl.where(count >= quota, count, reached)
    return cut, reached - quota


@triton.jit
def count_from(trial, key, among, rest, TILE: tl.constexpr, HAS_MORE: tl.constexpr):
    """Count the tokens to choose from whose key is at least `trial`."""
    count = tl.sum((among & (key >= trial)).to(tl.int32))
    if HAS_MORE:
        score, group, wanted, begin, end = rest
        for first in range(begin + TILE, end, TILE):
            position = first + tl.arange(0, TILE)
            others, are_among = load_tile(score, group, wanted, position, end)
            count += tl.sum((are_among & (others >= trial)).to(tl.int32))
    return count


@triton.jit
def pick(key, among, cut, passed):
    """Mark the tokens above a cut, and those on it but for the first `passed`.

    Returns:
        The marks of this tile, and what is left of `passed` for the next.
    """
    ties = among & (key == cut)
    number = tl.cumsum(ties.to(tl.int32))
    best = (among & (key > cut)) | (ties & (number > passed))
    return best, passed - tl.sum(ties.to(tl.int32))


MASK_TILE = 1024  # tokens that a program looks at at a time


def must_keep_tokens(
    num_pages: Tensor,
    num_local: Tensor,
    sinks: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    num_events, num_heads = num_pages.shape
    lengths = num_local.new_empty(num_events, num_heads)
    must_keep = lengths.new_empty((*lengths.shape, num_tokens), dtype=torch.bool)
    grid = (lengths.numel(), triton.cdiv(num_tokens, MASK_TILE))
    given = num_pages, *num_pages.stride(), num_local, sinks
    sizes = num_heads, block_size, num_tokens
    _must_keep[grid](*given, lengths, must_keep, *sizes, TILE=MASK_TILE)
    return lengths, must_keep


def limit_must_keep(must_keep: Tensor, budget: int) -> Tensor:
    limited = torch.empty_like(must_keep, memory_format=torch.contiguous_format)
    num_tokens = must_keep.shape[-1]
    if limited.numel() > 0:
        _limit_must_keep[(limited.numel() // num_tokens,)](
            must_keep.contiguous(), limited, budget, num_tokens, TILE=MASK_TILE
        )
    return limited


def fill_next_best(
    keep: Tensor, score: Tensor, valid: Tensor, target: Tensor | int
) -> Tensor:
    return _select(keep, score, None, valid, target, keeps_all=True)


def top_k_mask(
    score: Tensor, must_keep: Tensor, valid: Tensor, budget: Tensor | int
) -> Tensor:
    return _select(must_keep, score, None, valid, budget)


def resize(
    keep: Tensor,
    score: Tensor,
    must_keep: Tensor,
    num_pages: Tensor,
    quota: Tensor,
    block_size: int,
) -> Tensor:
    return _select(keep, score, must_keep, num_pages, quota, block_size)


def _select(
    keep: Tensor,
    score: Tensor,
    must_keep: Tensor | None,
    valid: Tensor,
    target: Tensor | int,
    unit: int = 1,
    keeps_all: bool = False,
) -> Tensor:
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
    sizes = launch_sizes(num_tokens)
    sizes |= {"HAS_TARGETS": isinstance(target, Tensor), "KEEPS_ALL": keeps_all}
    if isinstance(target, Tensor):
        target = target.expand(keep.shape[:-1]).contiguous()
    keep, valid = keep.contiguous(), valid.contiguous()
    must_keep = None if must_keep is None else must_keep.contiguous()
    masks = (valid, None) if valid.dtype == torch.bool else (None, valid)
    made = chosen, group, quota
    _grade[(num_rows,)](
        *(keep, must_keep, *masks, target, unit), *made, num_tokens, **sizes
    )
    rows = (num_rows, num_tokens)
    score = score.contiguous().view(rows)
    mark_best(score, group.view(rows), quota, None, chosen.view(rows))
    return chosen


@triton.jit(do_not_specialize=["target", "unit", "num_tokens"])
def _grade(
    keep, must_keep, valid, held, target, unit, chosen, group, quota, num_tokens,
    HAS_TARGETS: tl.constexpr, KEEPS_ALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sort one row's tokens into those in, those out and those to choose from.

    Without `valid` the first `held` [R] units of a row are valid; `target` is [R] or a
    number for all rows. Writes `chosen` [R, T] bool, the token is in whatever its
    score, `group` [R, T] uint8, 0 where its score decides and else 1, and `quota` [R]
    int32, how many of group 0 get in.
    """
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
    keep, must_keep, valid, start, position, num_tokens, num_held,
    KEEPS_ALL: tl.constexpr,
):  # fmt: skip
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
    num_pages, event_stride, head_stride, num_local, sinks,
    lengths, must_keep, num_heads, block_size, num_tokens,
    TILE: tl.constexpr,
):  # fmt: skip
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
def _limit_must_keep(must_keep, limited, budget, num_tokens, TILE: tl.constexpr):
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
