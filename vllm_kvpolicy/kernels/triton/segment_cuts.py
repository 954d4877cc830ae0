"""Cuts rows into segments of equal mass: where they start, and what lies before that.

Source: kernels.segment_quota, whose rules these are. Deviations: none.
Axes: R rows, T tokens, S segments.
"""

import struct

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.segment_quota import MASS_UNIT, num_thresholds
from vllm_kvpolicy.kernels.triton.radix_select import launch_sizes

NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)  # after all tokens
# Arguments whose alignment and values do not make a kernel of their own.
VARYING = [
    *("open_before", "mass_before", "num_tokens", "num_segments"),
    *("step", "count", "min_segment", "max_segment"),
]


def cut_rows(
    mass: torch.Tensor,
    lengths: torch.Tensor,
    exempt: torch.Tensor,
    num_segments: int,
    *,
    segment_mass: float,
    min_segment: int,
    max_segment: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Segment every row.

    Args:
        mass: [R, T] int64, contiguous.
        lengths: [R] int64, contiguous.
        exempt: [R, T] bool, contiguous.
        num_segments: S, a bound.
        segment_mass, min_segment, max_segment: see `segment_quota_ref`.

    Returns:
        [3, R, S + 1] int64: start of each segment, open tokens before it, open mass
        before it; entries after the last segment are those of the row's end. And the
        number of each token's segment, [R, T] int64, S on padding.
    """
    num_rows, num_tokens = mass.shape
    edges = mass.new_empty((3, num_rows, num_segments + 1))
    segment_of = torch.empty_like(mass)
    # Only the bits of a float64 reach a kernel unharmed.
    step = struct.unpack("<q", struct.pack("<d", segment_mass * MASS_UNIT))[0]
    _cut_row[(num_rows,)](
        mass,
        lengths,
        exempt,
        *edges,
        segment_of,
        num_tokens,
        num_segments,
        step,
        num_thresholds(segment_mass),
        min(min_segment, num_tokens),
        min(max_segment, num_tokens),
        # A product is rounded by itself, as the reference's is.
        enable_fp_fusion=False,
        **launch_sizes(num_tokens),
    )
    return edges, segment_of


@triton.jit(do_not_specialize=VARYING)
def _cut_row(
    mass,  # [R, T] int64
    lengths,  # [R] int64
    exempt,  # [R, T] bool
    starts,  # [R, S + 1] int64, written
    open_before,  # [R, S + 1] int64, written
    mass_before,  # [R, S + 1] int64, written
    segment_of,  # [R, T] int64, written
    num_tokens,
    num_segments,
    step,  # bits of the float64 mass between thresholds, in units
    count,  # thresholds
    min_segment,
    max_segment,
    TILE: tl.constexpr,
):
    """Walk one row, a tile at a time; everything but a few sums stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    step = step.to(tl.int64).to(tl.float64, bitcast=True)
    mass += row * num_tokens
    exempt += row * num_tokens
    segment_of += row * num_tokens
    starts += row * (num_segments + 1)
    open_before += row * (num_segments + 1)
    mass_before += row * (num_segments + 1)
    total_mass = tl.full((), 0, tl.int64)
    open_mass = tl.full((), 0, tl.int64)
    num_open = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)  # segments so far
    last_cut = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)  # of the newest segment
    for first in range(0, num_tokens, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < length
        tokens = tl.load(mass + position, mask=inside, other=0)
        reached = total_mass + tl.cumsum(tokens)
        cuts = inside & _is_cut(
            position, reached - tokens, reached, length, step, count
        )
        total_mass += tl.sum(tokens)

        cut_at = tl.where(cuts, position, NOWHERE)
        opens = position == 0
        stop = tl.minimum(first + TILE, length)
        next_start = _next_start(cut_at, last_cut, start + min_segment, max_segment)
        while next_start < stop:
            opens |= position == next_start
            start = next_start
            next_start = _next_start(cut_at, last_cut, start + min_segment, max_segment)
        last_cut = tl.maximum(last_cut, tl.max(tl.where(cuts, position, 0)))

        number = found + tl.cumsum(opens.to(tl.int32)) - 1
        found += tl.sum(opens.to(tl.int32))
        tl.store(
            segment_of + position,
            tl.where(inside, number, num_segments).to(tl.int64),
            mask=position < num_tokens,
        )
        skipped = tl.load(exempt + position, mask=inside, other=1)
        is_open = tl.where(skipped, 0, 1)
        tokens = tl.where(skipped, 0, tokens)
        opens &= number <= num_segments  # memory safety only: S is a bound
        tl.store(starts + number, position.to(tl.int64), mask=opens)
        older = num_open + tl.cumsum(is_open) - is_open
        tl.store(open_before + number, older.to(tl.int64), mask=opens)
        older_mass = open_mass + tl.cumsum(tokens) - tokens
        tl.store(mass_before + number, older_mass, mask=opens)
        num_open += tl.sum(is_open)
        open_mass += tl.sum(tokens)
    for first in range(0, num_segments + 1, TILE):
        slot = first + tl.arange(0, TILE)
        unused = (slot >= found) & (slot <= num_segments)
        tl.store(starts + slot, length.to(tl.int64), mask=unused)
        tl.store(open_before + slot, num_open.to(tl.int64), mask=unused)
        tl.store(mass_before + slot, open_mass, mask=unused)


@triton.jit
def _is_cut(position, before, reached, length, step, count):
    """Say which tokens open a segment, ahead of splitting and merging.

    Args:
        position: [TILE] int32.
        before: [TILE] int64, the row's mass before the token.
        reached: [TILE] int64, the row's mass with it.
        length: tokens of the row.
        step: float64, mass between thresholds.
        count: thresholds.
    """
    # The first threshold above `before` has this number or the next.
    number = (before.to(tl.float64) / step).to(tl.int64) + 1
    threshold = _threshold(number, step)
    number = tl.where(threshold > before, number, number + 1)
    threshold = _threshold(number, step)
    cuts = (number <= count) & (threshold <= reached)
    # A cut on position 0, which opens the first segment anyway, moves to 1, and a
    # threshold that rounding keeps out of reach cuts off the last token.
    cuts |= (position == 1) & (number > 1) & (count > 0)
    missed = (count > 0) & (_threshold(count, step) > reached)
    return cuts | (position == 0) | ((position == length - 1) & missed)


@triton.jit
def _threshold(number, step):
    """Return number * step, rounded to a float64, then half to even to an int64."""
    product = number.to(tl.float64) * step
    whole = product.to(tl.int64)
    part = product - whole.to(tl.float64)
    rounds_up = (part > 0.5) | ((part == 0.5) & (whole % 2 == 1))
    return whole + rounds_up.to(tl.int64)


@triton.jit
def _next_start(cut_at, last_cut, earliest, max_segment):
    """Find the first position from `earliest` on where a segment may start.

    Segments start at cuts and every `max_segment` tokens after one.

    Args:
        cut_at: [TILE] int32, positions of this tile's cuts.
        last_cut: the newest cut of the tiles before.
        earliest: a position, in any tile.

    Returns:
        The position, or one after the tile if it is not in this tile.
    """
    is_behind = cut_at > earliest
    from_cut = tl.maximum(last_cut, tl.max(tl.where(is_behind, 0, cut_at)))
    pieces = (earliest - from_cut + max_segment - 1) // max_segment
    piece = from_cut + pieces * max_segment
    return tl.minimum(piece, tl.min(tl.where(is_behind, cut_at, NOWHERE)))
