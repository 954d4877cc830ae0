"""Cuts, merges and quotas by hand; tests/policies compares whole selections."""

from collections.abc import Sequence

import pytest
import torch

from vllm_kvpolicy.kernels.segment_quota import (
    MASS_UNIT,
    SegmentQuotas,
    max_segments,
    num_thresholds,
    pick_by_quota,
    round_robin,
    segment_quota_ref,
    share_by_mass,
    to_fixed_point,
)


def quotas_of(
    mass: torch.Tensor,
    total: int,
    cuts: tuple[float, int, int],
    min_quota: int = 0,
    exempt: Sequence[int] = (),
    **options: bool,
) -> SegmentQuotas:
    """Segment rows [R, T] without padding.

    Args:
        cuts: mass between thresholds, least and most tokens of a segment.
        exempt: tokens that take no quota.
    """
    barred = torch.zeros(mass.shape, dtype=torch.bool)
    barred[:, list(exempt)] = True
    lengths, totals = (torch.full((len(mass),), n) for n in (mass.shape[1], total))
    names = "segment_mass", "min_segment", "max_segment"
    options = {**dict(zip(names, cuts, strict=True)), "min_quota": min_quota, **options}
    return segment_quota_ref(mass, lengths, barred, totals, **options)


def segments_of(mass: list[float], step: float, low: int, high: int) -> list[list[int]]:
    """Used segments of one row, from fixed-point and from float mass alike."""
    row = torch.tensor([mass], dtype=torch.float64)
    found = []
    for form in (row, to_fixed_point(row)):
        got = quotas_of(form, 1, (step, low, high))
        pairs = got.segments[0].tolist()
        found.append([pair for pair in pairs if pair[0] < pair[1]])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("step", "count"),
    [
        *((0.1, 9), (0.02, 49), (0.007, 142), (0.3, 3)),
        *((0.6, 1), (0.95, 1), (0.25, 3), (1.0, 0)),
    ],
)
def test_thresholds_are_below_one(step: float, count: int) -> None:
    assert num_thresholds(step) == count


def test_crossing_token_opens_the_next_segment() -> None:
    mass = [0.2, 0.2, 0.2, 0.2, 0.2]
    assert segments_of(mass, 0.5, 1, 99) == [[0, 2], [2, 5]]
    mass = [0.1, 0.4, 0.3, 0.2]  # reaches one half at index 1, exactly
    assert segments_of(mass, 0.5, 1, 99) == [[0, 1], [1, 4]]


def test_cut_at_the_first_token_moves_to_the_second() -> None:
    assert segments_of([0.9, 0.05, 0.05], 0.5, 1, 99) == [[0, 1], [1, 3]]


def test_unreached_threshold_cuts_off_the_last_token() -> None:
    row = torch.tensor([[MASS_UNIT // 4] * 3 + [0, 0]])  # rounding lost the rest
    got = quotas_of(row, 1, (0.9, 1, 99))
    assert got.segments[0, :2].tolist() == [[0, 4], [4, 5]]


def test_split_from_the_left_and_merge_forward() -> None:
    flat = [0.1] * 10
    assert segments_of(flat, 0.95, 1, 4) == [[0, 4], [4, 8], [8, 9], [9, 10]]
    assert segments_of(flat, 0.95, 3, 4) == [[0, 4], [4, 8], [8, 10]]
    assert segments_of(flat, 0.95, 5, 5) == [[0, 5], [5, 10]]
    # The last segment may stay short, a merged one may exceed the maximum.
    assert segments_of([0.04] * 24 + [0.02] * 2, 0.95, 6, 8) == [
        [0, 8],
        [8, 16],
        [16, 23],
        [23, 26],
    ]


@pytest.mark.parametrize("tokens", [1, 2, 15, 64, 200])
@pytest.mark.parametrize("step", [0.02, 0.1, 0.6])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 4), (3, 16), (16, 256)])
def test_bound_holds(tokens: int, step: float, low: int, high: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    mass = torch.rand(8, tokens, generator=generator, dtype=torch.float64) ** 6
    mass = to_fixed_point(mass / mass.sum(-1, keepdim=True))
    got = quotas_of(mass, tokens // 2, (step, low, high), min_quota=1)
    assert got.segments.shape[1] == max_segments(tokens, step, low, high)
    assert (got.segments[:, -1, 1] == tokens).all()
    assert (got.quotas.sum(-1) == tokens // 2).all()
    start, end = got.segments.unbind(-1)
    position = torch.arange(tokens)
    inside = (position >= start[..., None]) & (position < end[..., None])
    assert torch.equal(inside.long().argmax(1), got.segment_of)


def test_even_shares_are_blind_to_mass() -> None:
    row = torch.tensor([[MASS_UNIT, 0, 0, 0, 0, 0, 0]])
    got = quotas_of(row, 4, (1.0, 1, 3), 9, exempt=(1, 2), by_mass=False)
    # Open tokens: 1, 3, 1. One each, then the only segment that has more.
    assert got.quotas.tolist() == [[1, 2, 1]]


def test_picks_the_best_of_each_group() -> None:
    score = torch.tensor([[5.0, 9.0, 7.0, 7.0, 1.0, float("nan")]])
    group = torch.tensor([[0, 0, 1, 1, 2, 1]])
    got = pick_by_quota(score, group, torch.tensor([[1, 2]]))
    assert got.tolist() == [[False, True, True, True, False, False]]
    one = pick_by_quota(score, group, torch.tensor([[0, 1]]))
    assert one.tolist() == [[False, False, False, True, False, False]]


def test_round_robin_equals_dealing() -> None:
    generator = torch.Generator().manual_seed(0)
    capacity = torch.randint(0, 9, (200, 7), generator=generator)
    total = torch.randint(0, 70, (200, 1), generator=generator)
    got = round_robin(capacity, total)
    for r in range(200):
        given, left = [0] * 7, min(int(total[r]), int(capacity[r].sum()))
        while left:
            for i in range(7):
                if left and given[i] < capacity[r, i]:
                    given[i], left = given[i] + 1, left - 1
        assert got[r].tolist() == given


def test_round_robin_of_large_numbers() -> None:
    capacity = torch.tensor([[2**20, 3, 2**20]])
    got = round_robin(capacity, torch.tensor([[2**20]]))
    assert got.tolist() == [[524287, 3, 524286]]


def test_shares_follow_mass_and_round_half_to_even() -> None:
    capacity = torch.tensor([[50, 50, 50, 50]])
    unit = MASS_UNIT // 8
    mass = torch.tensor([[unit, 3 * unit, unit, 3 * unit]])
    # 20 tokens: shares 2.5, 7.5, 2.5, 7.5 round to 2, 8, 2, 8.
    got = share_by_mass(capacity, mass, torch.tensor([20]), 0)
    assert got.tolist() == [[2, 8, 2, 8]]


def test_floors_beyond_the_budget() -> None:
    capacity = torch.tensor([[9, 9, 9, 0, 9]])
    mass = torch.tensor([[5, 1, 7, 0, 1]])
    for total, want in [
        (10, [2, 2, 3, 0, 3]),
        (4, [1, 1, 1, 0, 1]),
        (3, [1, 0, 1, 0, 1]),
        (1, [0, 0, 1, 0, 0]),
        (0, [0, 0, 0, 0, 0]),
    ]:
        got = share_by_mass(capacity, mass, torch.tensor([total]), 3)
        assert got.tolist() == [want]
        got = share_by_mass(capacity, mass.double(), torch.tensor([total]), 3)
        assert got.tolist() == [want]
