"""Cuts a row of tokens into segments of equal mass and shares a budget among them.

Source: AMS (arXiv 2605.23200) section 3.2-3.3, appendix B; where paper and code differ,
the cut, split, merge and round-robin rules are those of the code,
https://github.com/EIT-NLP/AdaptiveMassSegment/blob/7eb32cd75600c55888f223dddd2827a81d4f6a80/kvpress/presses/adaptive_segment_head_press.py.
Deviations: one segmentation per row (theirs is shared by the batch); a fixed-point
cumulative mass, so that sums do not depend on their order; a closed form instead of a
token-by-token round robin; quotas also exist where there are more segments than budget
(theirs never returns); max_segment holds where there is no threshold, too.
Axes: R rows, T tokens (right-padded), S segments (a bound known from the sizes alone).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.ranking import ranks_of, ranks_within

MASS_UNIT = 2**28  # fixed-point mass of a whole row
MASS_EPS = 1e-12  # keeps a row without any attention a distribution


@dataclass(frozen=True)
class SegmentQuotas:
    """Segments of each row, and how many of its choosable tokens each may keep.

    Args:
        segments: [R, S, 2] int64, half-open (start, end), oldest first; unused ones
            are (length, length).
        quotas: [R, S] int64, tokens; 0 for unused segments.
        segment_of: [R, T] int64, index of each token's segment; S on padding.
    """

    segments: Tensor
    quotas: Tensor
    segment_of: Tensor


def num_thresholds(segment_mass: float) -> int:
    """Count the k >= 1 with k * segment_mass < 1, up to rounding of the product."""
    count = int(1 / segment_mass)
    return count - 1 if count * segment_mass > 1 - 1e-9 else count


def max_segments(
    num_tokens: int, segment_mass: float, min_segment: int, max_segment: int
) -> int:
    """Bound the segments of any row of `num_tokens` tokens (S)."""
    by_cuts = num_thresholds(segment_mass) + 1 + num_tokens // max_segment
    by_length = (num_tokens - 1) // min_segment + 1
    return min(by_cuts, by_length)


def segment_quota_ref(
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
    """Segment every row and share `total` tokens among its segments.

    Example: with thresholds every half of the mass, tokens of mass .3 .1 .1 .1 .1 .3
    form the segments [0, 2) and [2, 6). The first token is exempt, so the segments have
    the masses .1 and .6 to share three tokens by, and each gets at least one.

    >>> mass = torch.tensor([[0.3, 0.1, 0.1, 0.1, 0.1, 0.3]], dtype=torch.float64)
    >>> made = segment_quota_ref(
    ...     to_fixed_point(mass),
    ...     lengths=torch.tensor([6]),
    ...     exempt=torch.tensor([[True] + [False] * 5]),
    ...     total=torch.tensor([3]),
    ...     segment_mass=0.5,
    ...     min_segment=1,
    ...     max_segment=8,
    ...     min_quota=1,
    ... )
    >>> made.quotas, made.segment_of
    (tensor([[1, 2]]), tensor([[0, 0, 1, 1, 1, 1]]))

    Args:
        mass: [R, T] int64 in units of 1 / MASS_UNIT (exact, for serving) or float64
            summing to 1 (as the authors' code); non-negative, zero on padding.
        lengths: [R] int64, tokens of the row, 1..T.
        exempt: [R, T] bool, tokens that take no quota: they count for the length and
            the cuts of a segment, not for its mass or its capacity.
        total: [R] int64, tokens to share, 0..choosable tokens of the row.
        segment_mass: mass between thresholds, above 0; 1 for no thresholds.
        min_segment: tokens; shorter segments absorb the next one.
        max_segment: tokens; longer ones are cut into pieces of this length first.
        min_quota: tokens for each segment, as far as it and the budget hold them.
        by_mass: share by mass; otherwise evenly, whatever `min_quota`.

    Returns:
        The segments; quotas add up to `total` in each row.
    """
    bound = max_segments(mass.shape[-1], segment_mass, min_segment, max_segment)
    flags = _cut_flags(mass, lengths, segment_mass)
    flags = _split_long(flags, max_segment)
    starts, ends = _merge_short(flags, lengths, min_segment, bound)
    open_count = _sum_between((~exempt).long(), starts, ends)
    if by_mass:
        open_mass = _sum_between(mass.masked_fill(exempt, 0), starts, ends)
        quotas = share_by_mass(open_count, open_mass, total, min_quota)
    else:
        quotas = round_robin(open_count, total[:, None])
    segments = torch.stack((starts, ends), dim=-1)
    return SegmentQuotas(segments, quotas, _segment_of(starts, lengths, mass.shape[-1]))


def check_exact(mass: Tensor) -> None:
    """Raise ValueError unless a mass is in int64 units, which twins sum exactly."""
    if mass.dtype != torch.int64:
        raise ValueError(f"mass: expected int64 units, got {mass.dtype}")


def pick_by_quota_ref(score: Tensor, group: Tensor, quotas: Tensor) -> Tensor:
    """Mark the best tokens of each group, as many as its quota.

    Example: one token of group 0 and two of group 1.

    >>> score = torch.tensor([[9.0, 1.0, 5.0, 3.0, 7.0, 2.0]])
    >>> group = torch.tensor([[0, 0, 1, 1, 1, 1]])
    >>> pick_by_quota_ref(score, group, quotas=torch.tensor([[1, 2]]))
    tensor([[ True, False,  True, False,  True, False]])

    Args:
        score: [R, T] floating point; NaN allowed.
        group: [R, T] int64, 0..S; S for tokens that are not to be picked.
        quotas: [R, S] int64, tokens.

    Returns:
        [R, T] bool.
    """
    quota = torch.nn.functional.pad(quotas, (0, 1)).gather(-1, group)
    return ranks_within(score, group) < quota


def credited_mass_ref(
    usage: Tensor, lengths: Tensor, credit: Tensor | None, decay: float, mix: float
) -> tuple[Tensor, Tensor]:
    """Turn usage into mass, and mix in the moving average of past mass.

    With m the normalised usage: c = decay * c_old + (1 - decay) * m, and the mass is
    mix * m + (1 - mix) * c / sum(c). At a first event both terms are m.

    Args:
        usage: [R, T] floating point; negative values and NaN count as zero.
        lengths: [R] int64, tokens of the row, 1..T.
        credit: [R, T] floating point, c_old, or None at a first event.
        decay: of the average, 0 to 1.
        mix: share of the newest mass, 0 to 1.

    Returns:
        mass [R, T] float64, adding up to 1, and c [R, T] float32; both zero on padding.
    """
    valid = torch.arange(usage.shape[-1], device=usage.device) < lengths[:, None]
    mass = normalised(usage, valid)
    if credit is None:
        return mass, ((1 - decay) * mass).float()
    old = torch.where(valid, credit.double(), 0.0)
    updated = decay * old + (1 - decay) * mass
    mixed = mix * mass + (1 - mix) * normalised(updated, valid)
    return mixed, updated.float()


def normalised(values: Tensor, valid: Tensor) -> Tensor:
    """Scale [R, T] to sum 1 per row, in float64, whatever the padding and sum order.

    Values are shifted by MASS_EPS, rounded to 2^-32 of the row's largest one and added
    up as integers.
    """
    finite = values.double().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    positive = torch.where(valid, finite.clamp(min=0) + MASS_EPS, 0.0)
    units = (positive / positive.amax(-1, keepdim=True) * 2**32).round().long()
    return units.double() / units.sum(-1, keepdim=True).double()


def to_fixed_point(mass: Tensor) -> Tensor:
    """Round a mass that sums to 1 per row, [R, T] float64, to units, [R, T] int64."""
    return (mass * MASS_UNIT).round().long()


def _cut_flags(mass: Tensor, lengths: Tensor, segment_mass: float) -> Tensor:
    """Flag [R, T] the tokens that open a segment: those that cross a threshold."""
    count = num_thresholds(segment_mass)
    unit = 1 if mass.is_floating_point() else MASS_UNIT
    steps = torch.arange(1, count + 1, device=mass.device, dtype=torch.float64)
    thresholds = steps * (segment_mass * unit)
    if not mass.is_floating_point():
        thresholds = thresholds.round().long()
    crossed = torch.searchsorted(thresholds, mass.cumsum(-1), right=True)
    position = torch.arange(mass.shape[-1], device=mass.device)
    last = lengths[:, None] - 1
    flags = crossed > crossed.roll(1, -1)
    # Position 0 opens the first segment anyway; a cut that falls on it moves to 1, and
    # a threshold that rounding keeps out of reach cuts off the last token.
    flags |= (position == 1) & (crossed[:, :1] > 0)
    flags |= (position == last) & (crossed < count)
    flags &= position <= last
    flags[:, 0] = True
    return flags


def _split_long(flags: Tensor, max_segment: int) -> Tensor:
    """Cut segments longer than `max_segment` into pieces of that length, from the left.

    The remainder stays a short last piece. Pieces beyond a row's length are harmless.
    """
    position = torch.arange(flags.shape[-1], device=flags.device)
    start = torch.where(flags, position, 0).cummax(-1).values
    return (position - start) % max_segment == 0


def _merge_short(
    flags: Tensor, lengths: Tensor, min_segment: int, bound: int
) -> tuple[Tensor, Tensor]:
    """Walk the flags, oldest first, skipping those closer than `min_segment`.

    Returns:
        starts and ends, [R, bound] int64 each.
    """
    num_tokens = flags.shape[-1]
    position = torch.arange(num_tokens, device=flags.device)
    end = lengths[:, None]
    next_flag = torch.where(flags & (position < end), position, end)
    next_flag = torch.cat((next_flag, end), dim=-1)
    next_flag = next_flag.flip(-1).cummin(-1).values.flip(-1)
    walk = [torch.zeros_like(end)]
    for _ in range(bound):
        walk.append(
            next_flag.gather(-1, (walk[-1] + min_segment).clamp(max=num_tokens))
        )
    edges = torch.cat(walk, dim=-1)
    return edges[:, :-1], edges[:, 1:]


def _segment_of(starts: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """Number each token's segment, [R, T] int64; S on padding."""
    num_rows, bound = starts.shape
    is_used = starts < lengths[:, None]
    opens = starts.new_zeros((num_rows, num_tokens + 1))
    opens.scatter_(-1, torch.where(is_used, starts, num_tokens), 1)
    position = torch.arange(num_tokens, device=starts.device)
    number = opens[:, :num_tokens].cumsum(-1) - 1
    return torch.where(position < lengths[:, None], number, bound)


def _sum_between(values: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Sum `values` [R, T] over each half-open segment, [R, S]."""
    running = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
    return running.gather(-1, ends) - running.gather(-1, starts)


def share_by_mass(
    capacity: Tensor, mass: Tensor, total: Tensor, min_quota: int
) -> Tensor:
    """Share `total` tokens among segments: a floor for each, the rest by mass.

    Shares are rounded half to even; what rounding and full segments leave over, or what
    rounding took too much, goes round robin from the oldest segment.

    Args:
        capacity: [R, S] int64, tokens that a segment can keep at most.
        mass: [R, S] int64 (units) or float64.
        total: [R] int64, at most the row's capacity.
        min_quota: tokens.

    Returns:
        [R, S] int64, adding up to `total`.
    """
    total = total[:, None]
    floor = capacity.clamp(max=min_quota)
    surplus = floor.sum(-1, keepdim=True) - total
    base = _shrink_floors(floor, mass, surplus.clamp(min=0))
    whole = mass.sum(-1, keepdim=True)
    whole = whole + 1e-12 if mass.is_floating_point() else whole.clamp(min=1)
    # In fixed point the product is below 2^53: one exact product, one rounded quotient.
    share = (-surplus).clamp(min=0).double() * mass.double() / whole.double()
    quotas = torch.minimum(base + share.round().long(), capacity)
    excess = quotas.sum(-1, keepdim=True) - total
    quotas = quotas - round_robin(quotas - base, excess.clamp(min=0))
    return quotas + round_robin(capacity - quotas, (-excess).clamp(min=0))


def _shrink_floors(floor: Tensor, mass: Tensor, surplus: Tensor) -> Tensor:
    """Lower floors [R, S] that exceed the budget by `surplus` [R, 1] tokens.

    First round robin down to one token each; then the segments of least mass (ties go
    to the older) lose their last token.
    """
    spare = (floor - 1).clamp(min=0)
    left = (surplus - spare.sum(-1, keepdim=True)).clamp(min=0)
    floor = floor - round_robin(spare, surplus)
    highest = torch.finfo if mass.is_floating_point() else torch.iinfo
    weight = mass.masked_fill(floor == 0, highest(mass.dtype).max)
    rank = ranks_of(weight.sort(dim=-1, stable=True).indices)
    return torch.where(rank < left, 0, floor)


def round_robin(capacity: Tensor, total: Tensor) -> Tensor:
    """Deal out tokens one at a time from the first segment on, skipping full ones.

    Closed form: every segment gets min(capacity, level) with the highest level that
    `total` covers; the first segments still open get one more.

    Example: six tokens for segments that hold 3, 1 and 5. Level 2 takes 2 + 1 + 2, and
    the sixth goes to the first segment that is still open.

    >>> round_robin(torch.tensor([[3, 1, 5]]), torch.tensor([[6]]))
    tensor([[3, 1, 2]])

    Args:
        capacity: [R, S] int64, non-negative.
        total: [R, 1] int64; what exceeds the row's capacity is not dealt.

    Returns:
        [R, S] int64.
    """
    level = torch.zeros_like(total)
    # The level is found bit by bit, from one that no count of tokens reaches.
    for bit in reversed(range(24)):
        higher = level + 2**bit
        dealt = torch.minimum(capacity, higher).sum(-1, keepdim=True)
        level = torch.where(dealt <= total, higher, level)
    given = torch.minimum(capacity, level)
    is_open = capacity > level
    left = total - given.sum(-1, keepdim=True)
    return given + (is_open & (is_open.long().cumsum(-1) <= left)).long()


credited_mass = Operation(credited_mass_ref)
segment_quota = Operation(segment_quota_ref)
pick_by_quota = Operation(pick_by_quota_ref)
