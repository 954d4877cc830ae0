"""Twins of kernels.segment_quota: a program per row, or per group of tokens to pick."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.segment_quota import (
    MASS_EPS,
    MASS_UNIT,
    SegmentQuotas,
    check_exact,
    max_segments,
    num_thresholds,
)
from vllm_kvpolicy.kernels.triton.ranking import find_cut, launch_sizes, mark_best, pick

MASS_TILE = 1024  # tokens of a row that a program holds at a time
FIRST_STEP: tl.constexpr = tl.constexpr(2**23)  # no row has twice as many tokens
NOWHERE: tl.constexpr = tl.constexpr(2**31 - 1)  # after all tokens
# Arguments whose alignment and values do not make a kernel of their own.
VARYING = ["open_before", "mass_before", "num_segments", "min_quota"]
CUTS_VARYING = [
    *("open_before", "mass_before", "num_tokens", "num_segments"),
    *("step", "count", "min_segment", "max_segment"),
]


def _bits_of(*numbers: float) -> tuple[int, ...]:
    """Return the bits of float64 numbers, which alone reach a kernel unharmed."""
    count = len(numbers)
    return struct.unpack(f"<{count}q", struct.pack(f"<{count}d", *numbers))


@triton.jit(do_not_specialize=CUTS_VARYING)
def _cut_row(
    mass, lengths, exempt, starts, open_before, mass_before, segment_of,
    num_tokens, num_segments, step, count, min_segment, max_segment,
    TILE: tl.constexpr,
):  # fmt: skip
    """Walk one row, a tile at a time; everything but a few sums stays in registers.

    `step` has the bits of the float64 mass between thresholds, of which there are
    `count`. Writes [R, S + 1] int64 each, the `starts` of segments and the open tokens
    and their mass before them; entries after the last segment are those of the row's
    end. And `segment_of`, as the operation returns it.
    """
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

    The row's mass is `before` without and `reached` with each token; there are `count`
    thresholds, a float64 mass `step` apart.
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
    return _rounded(number.to(tl.float64) * step)


@triton.jit
def _rounded(value):
    """Round a non-negative float64 half to even, to an int64."""
    whole = value.to(tl.int64)
    part = value - whole.to(tl.float64)
    rounds_up = (part > 0.5) | ((part == 0.5) & (whole % 2 == 1))
    return whole + rounds_up.to(tl.int64)


@triton.jit
def _next_start(cut_at, last_cut, earliest, max_segment):
    """Find the first position from `earliest` on where a segment may start.

    Segments start at cuts and every `max_segment` tokens after one. `cut_at` [TILE] are
    the cuts of this tile, `last_cut` is the newest of the tiles before. Returns a
    position after the tile if it is not in this tile.
    """
    is_behind = cut_at > earliest
    from_cut = tl.maximum(last_cut, tl.max(tl.where(is_behind, 0, cut_at)))
    pieces = (earliest - from_cut + max_segment - 1) // max_segment
    piece = from_cut + pieces * max_segment
    return tl.minimum(piece, tl.min(tl.where(is_behind, cut_at, NOWHERE)))


def credited_mass(
    usage: Tensor, lengths: Tensor, credit: Tensor | None, decay: float, mix: float
) -> tuple[Tensor, Tensor]:
    num_rows, num_tokens = usage.shape
    mass = usage.new_empty(usage.shape, dtype=torch.float64)
    updated = usage.new_empty(usage.shape, dtype=torch.float32)
    credit = None if credit is None else credit.contiguous()
    rows = usage.contiguous(), lengths.contiguous(), credit, mass, updated
    numbers = _bits_of(decay, 1 - decay, mix, 1 - mix, MASS_EPS)
    # A product is rounded by itself, as the reference's is.
    options = {"enable_fp_fusion": False, "TILE": MASS_TILE}
    _credited_mass[(num_rows,)](*rows, num_tokens, *numbers, **options)
    return mass, updated


def segment_quota(
    mass: Tensor,
    lengths: Tensor,
    exempt: Tensor,
    total: Tensor,
    *,
    segment_mass: float,
    min_segment: int,
    max_segment: int,
    min_quota: int,
    by_mass: bool = True,
) -> SegmentQuotas:
    check_exact(mass)
    num_rows, num_tokens = mass.shape
    bound = max_segments(num_tokens, segment_mass, min_segment, max_segment)
    edges = mass.new_empty((3, num_rows, bound + 1))
    segment_of = mass.new_empty(mass.shape)
    rows = (each.contiguous() for each in (mass, lengths, exempt))
    thresholds = *_bits_of(segment_mass * MASS_UNIT), num_thresholds(segment_mass)
    bounds = min(min_segment, num_tokens), min(max_segment, num_tokens)
    _cut_row[(num_rows,)](
        *(*rows, *edges, segment_of, num_tokens, bound, *thresholds, *bounds),
        # A product is rounded by itself, as the reference's is.
        enable_fp_fusion=False,
        **launch_sizes(num_tokens),
    )
    segments = mass.new_empty((num_rows, bound, 2))
    quotas = mass.new_empty((num_rows, bound))
    inputs = *edges, total.contiguous()
    sizes = launch_sizes(bound, triton.next_power_of_2(bound))
    _share_row[(num_rows,)](
        *(*inputs, segments, quotas, bound, min(min_quota, num_tokens)),
        BY_MASS=by_mass,
        **sizes,
    )
    return SegmentQuotas(segments, quotas, segment_of)


def pick_by_quota(score: Tensor, group: Tensor, quotas: Tensor) -> Tensor:
    """Each program looks at the tokens between the first and the last of one group.

    So groups which are runs of neighbours cost one pass over the row, others more.
    """
    picked = torch.empty_like(
        score, dtype=torch.bool, memory_format=torch.contiguous_format
    )
    if picked.numel() == 0:
        return picked
    num_rows, num_tokens = score.shape
    num_groups = quotas.shape[-1]
    group = group.contiguous()
    ranges = group.new_zeros((2, num_rows, num_groups), dtype=torch.int32)
    sizes = launch_sizes(num_tokens, 1024)
    _find_groups[(num_rows, triton.cdiv(num_tokens, sizes["TILE"]))](
        group, *ranges, picked, num_tokens, num_groups, **sizes
    )
    mark_best(score.contiguous(), group, quotas.contiguous(), tuple(ranges), picked)
    return picked


@triton.jit(do_not_specialize=["ends", "num_tokens", "num_groups"])
def _find_groups(
    group, begins, ends, picked, num_tokens, num_groups, TILE: tl.constexpr
):
    """Note where the groups of a tile begin and end, and clear `picked`.

    `begins` and `ends` are the ranges of `mark_best`, zero before.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = position < num_tokens
    here = group + row * num_tokens + position
    own = tl.load(here, mask=inside, other=-1)
    before = tl.load(here - 1, mask=inside & (position > 0), other=-1)
    after = tl.load(here + 1, mask=position + 1 < num_tokens, other=-1)
    counts = (own >= 0) & (own < num_groups)
    entry = row * num_groups + own
    # Neighbours of the same group need not note anything.
    opens, closes = counts & (own != before), counts & (own != after)
    tl.atomic_max(begins + entry, num_tokens - position, mask=opens, sem="relaxed")
    tl.atomic_max(ends + entry, position + 1, mask=closes, sem="relaxed")
    tl.store(picked + row * num_tokens + position, 0, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _share_row(
    starts, open_before, mass_before, total, segments, quotas,
    num_segments, min_quota,
    BY_MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Share one row's tokens among its segments, which one tile holds.

    The first three arguments are what `_cut_row` writes.
    At most one round robin is due: it lowers floors that exceed the budget, or takes
    back what rounding gave too much, or deals out what is left.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, TILE)
    is_slot = slot < num_segments
    edge = row * (num_segments + 1) + slot
    place = row * num_segments + slot
    tl.store(segments + 2 * place, tl.load(starts + edge, mask=is_slot), mask=is_slot)
    end = tl.load(starts + edge + 1, mask=is_slot)
    tl.store(segments + 2 * place + 1, end, mask=is_slot)
    capacity = _between(open_before, edge, is_slot)
    budget = tl.load(total + row)
    if BY_MASS:
        mass = _between(mass_before, edge, is_slot)
        floor = tl.minimum(capacity, min_quota)
        surplus = tl.sum(floor) - budget
        share = tl.maximum(-surplus, 0) * mass
        share = _divide(share, tl.maximum(tl.sum(mass), 1))
        wish = tl.minimum(floor + share, capacity)
        excess = tl.sum(wish) - budget
        # Where floors exceed the budget, wishes are floors, and one token is the least.
        least = tl.where(surplus > 0, tl.minimum(floor, 1), floor)
        room = tl.where(excess > 0, wish - least, capacity - wish)
        dealt = _round_robin(room, tl.abs(excess))
        quota = tl.where(excess > 0, wish - dealt, wish + dealt)
        if tl.sum(quota) > budget:
            # One token each is too many: only segments of most mass get one; ties
            # go to the newer.
            cut, passed = find_cut(
                mass, quota > 0, budget, None, None, 0, 0, 0, TILE, False
            )
            richest, _ = pick(mass, quota > 0, cut, passed.to(tl.int32))
            quota = richest.to(tl.int64)
    else:
        quota = _round_robin(capacity, budget)
    tl.store(quotas + place, quota, mask=is_slot)


@triton.jit
def _between(running, edge, is_slot):
    """Return what a running sum grows by within each segment, 0 in unused lanes."""
    end = tl.load(running + edge + 1, mask=is_slot, other=0)
    return end - tl.load(running + edge, mask=is_slot, other=0)


@triton.jit
def _divide(dividend, divisor):
    """Divide non-negative int64, rounding half to even.

    The reference divides in float64. Both round to the same integer while the dividend
    is below 2^53: a quotient that is not a half is then too far from one for its
    float64 to be one.
    """
    whole = dividend // divisor
    twice = 2 * (dividend - whole * divisor)
    rounds_up = (twice > divisor) | ((twice == divisor) & (whole % 2 == 1))
    return whole + rounds_up.to(tl.int64)


@triton.jit
def _round_robin(capacity, total):
    """Deal out `total` tokens as the reference's `round_robin` does, [TILE] int64."""
    level = total * 0
    step = level + FIRST_STEP
    while step > 0:
        higher = level + step
        dealt = tl.sum(tl.minimum(capacity, higher))
        level = tl.where(dealt <= total, higher, level)
        step //= 2
    given = tl.minimum(capacity, level)
    is_open = capacity > level
    turn = tl.cumsum(is_open.to(tl.int32))
    left = total - tl.sum(given)
    return given + (is_open & (turn <= left)).to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens", "decay", "gain", "mix", "rest", "eps"])
def _credited_mass(
    usage, lengths, credit, mass, updated, num_tokens, decay, gain, mix, rest, eps,
    TILE: tl.constexpr,
):  # fmt: skip
    """Normalise one row's usage, average it, and normalise the average.

    Numbers from `decay` on are the bits of a float64.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    start = row * num_tokens
    decay, gain, eps = _float(decay), _float(gain), _float(eps)
    mix, rest = _float(mix), _float(rest)
    highest = tl.full((), 0.0, tl.float64)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        value = _positive(usage, start, token, length, eps)
        highest = tl.maximum(highest, tl.max(value))
    total = tl.full((), 0, tl.int64)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        value = _positive(usage, start, token, length, eps)
        total += tl.sum(_units(value, highest))
    top = tl.full((), 0.0, tl.float64)
    whole = tl.full((), 0, tl.int64)
    row_of = (start, length, eps, highest, total)
    if credit is not None:
        for first in range(0, num_tokens, TILE):
            token = first + tl.arange(0, TILE)
            _, _, shifted = _averages(usage, credit, token, row_of, decay, gain)
            top = tl.maximum(top, tl.max(shifted))
        for first in range(0, num_tokens, TILE):
            token = first + tl.arange(0, TILE)
            _, _, shifted = _averages(usage, credit, token, row_of, decay, gain)
            whole += tl.sum(_units(shifted, top))
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        if credit is None:
            mixed = _share(usage, token, row_of)
            average = gain * mixed
        else:
            new, average, shifted = _averages(usage, credit, token, row_of, decay, gain)
            past = _units(shifted, top).to(tl.float64) / whole.to(tl.float64)
            mixed = mix * new + rest * past
        inside = token < num_tokens
        tl.store(mass + start + token, mixed, mask=inside)
        tl.store(updated + start + token, average.to(tl.float32), mask=inside)


@triton.jit
def _float(bits):
    """Return the float64 with these bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _positive(values, start, token, length, eps):
    """Load values that count, at least `eps`; 0 on padding."""
    inside = token < length
    value = tl.load(values + start + token, mask=inside, other=0.0).to(tl.float64)
    value = tl.where(value > 0, value, 0.0)  # NaN is not
    value = tl.where(value == float("inf"), 3.4028234663852886e38, value)
    return tl.where(inside, value + eps, 0.0)


@triton.jit
def _units(value, highest):
    """Round to 2^-32 of the highest value, half to even."""
    return _rounded(value / highest * 4294967296.0)


@triton.jit
def _share(values, token, row_of):
    """Return the share of each value in the `total` of the row's units."""
    start, length, eps, highest, total = row_of
    value = _positive(values, start, token, length, eps)
    return _units(value, highest).to(tl.float64) / total.to(tl.float64)


@triton.jit
def _averages(usage, credit, token, row_of, decay, gain):
    """Return shares, the moving average with them, and it plus `eps`; 0 on padding."""
    start, length, eps, highest, total = row_of
    new = _share(usage, token, row_of)
    old = tl.load(credit + start + token, mask=token < length, other=0.0)
    average = decay * old.to(tl.float64) + gain * new
    return new, average, tl.where(token < length, average + eps, 0.0)
