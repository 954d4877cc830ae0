"""Marks the best tokens of each group of a row, without sorting the row.

The quota-th best score is found bit by bit, from the highest one down: a bit is set if
enough tokens are at least as good. Sums of flags are all that it takes, so the result
does not depend on their order. Of equal scores the later position wins.

Source: radix selection (Alabi et al., Fast k-selection algorithms for graphics
processing units, 2012). Deviations: one bit per pass, in registers.
"""

import torch
import triton
import triton.language as tl

MAX_TILE = 4096  # tokens that a program holds in registers
GROUP_TILE = 512  # the same where programs look at one group of many


def mark_best(
    score: torch.Tensor,
    group: torch.Tensor,
    quotas: torch.Tensor,
    ranges: tuple[torch.Tensor, torch.Tensor] | None,
    marked: torch.Tensor,
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
    _mark_best[(num_rows, num_groups)](
        score,
        group,
        quotas,
        None if ranges is None else ranges[0],
        None if ranges is None else ranges[1],
        marked,
        num_tokens,
        num_groups,
        HAS_MORE=num_tokens > sizes["TILE"],
        **sizes,
    )


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
    score,  # [R, T]
    group,  # [R, T]
    quotas,  # [R, S]
    begins,  # [R, S] int32, T minus the first position of a group, or None
    ends,  # [R, S] int32, one past its last position, or None
    marked,  # [R, T] bool
    num_tokens,
    num_groups,
    TILE: tl.constexpr,
    HAS_MORE: tl.constexpr,
):
    """Search one group of one row; its first tile stays in registers."""
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
    """Load keys, and whether tokens belong to the wanted group."""
    inside = position < end
    key = order_key(tl.load(score + position, mask=inside, other=0.0))
    return key, inside & (tl.load(group + position, mask=inside, other=0) == wanted)


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
    key,
    among,
    quota,
    score,
    group,
    wanted,
    begin,
    end,
    TILE: tl.constexpr,
    HAS_MORE: tl.constexpr,
):
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
    reached = _count(cut, key, among, rest, TILE, HAS_MORE)
    # Where exactly the quota is reached, lower bits change nothing.
    while (bit > 0) & (reached > quota):
        bit -= 1
        trial = cut ^ (one << bit)
        count = _count(trial, key, among, rest, TILE, HAS_MORE)
        cut = tl.where(count >= quota, trial, cut)
        reached = tl.where(count >= quota, count, reached)
    return cut, reached - quota


@triton.jit
def _count(trial, key, among, rest, TILE: tl.constexpr, HAS_MORE: tl.constexpr):
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
