"""Tests of the arithmetic: latencies, paired ratios, bootstrap, Wilson, McNemar."""

from math import comb, sqrt

import numpy as np
import pytest

from benchmarks import stats
from benchmarks.load import Completion
from benchmarks.stats import (
    FLIPS,
    TRIED,
    estimate_difference,
    estimate_mean,
    first_token_latencies,
    holm,
    latencies,
    mcnemar,
    median_ratio,
    paired_ratios,
)
from reasoner.intervals import wilson


def test_first_and_later_turns_wait_apart():
    waits = [(1, 2.0), (2, 0.1), (3, 0.2), (1, 4.0), (2, 0.6)]
    turns = [Completion(1.0, [5], [1.0 + wait], turn=turn) for turn, wait in waits]
    found = first_token_latencies(turns)
    assert found == {
        "ttft_p99_ms": pytest.approx(np.percentile([2000, 100, 200, 4000, 600], 99)),
        "ttft_first_ms": pytest.approx(3000),
        "ttft_first_p99_ms": pytest.approx(3980),
        "ttft_later_ms": pytest.approx(200),
        "ttft_later_p99_ms": pytest.approx(592),
    }
    alone = first_token_latencies(turns[:1])
    assert alone["ttft_later_ms"] is None and alone["ttft_later_p99_ms"] is None
    assert alone["ttft_first_ms"] == alone["ttft_p99_ms"] == pytest.approx(2000)


def test_latencies_of_two_requests():
    first = Completion(10.0, [1, 2, 3], [10.5, 10.6, 10.8])
    second = Completion(10.1, [4, 5, 6], [11.1, 11.1, 12.0])
    found = latencies([first, second])
    assert found["wall_s"] == pytest.approx(2.0)
    assert found["output_tok_s"] == pytest.approx(3.0)
    assert found["ttft_ms"] == pytest.approx((500 + 1000) / 2)
    assert found["tpot_ms"] == pytest.approx((150 + 450) / 2)
    gaps = [100, 200, 0, 900]
    assert found["itl_p50_ms"] == pytest.approx(np.median(gaps))
    assert found["itl_p99_ms"] == pytest.approx(np.percentile(gaps, 99))


def test_ratios_are_paired():
    assert paired_ratios([2, 9], [1, 3]) == [2, 3]
    assert np.isnan(paired_ratios([1], [0])[0])


@pytest.mark.parametrize("ours, theirs", [([], []), ([1], [1, 2]), ([1, 2], [1])])
def test_ratios_refuse_what_is_not_paired(ours, theirs):
    with pytest.raises(ValueError, match="expected equally many"):
        paired_ratios(ours, theirs)


def test_bootstrap_is_seeded_and_contains_the_median():
    rng = np.random.default_rng(0)
    theirs = rng.uniform(90, 110, size=15)
    ours = theirs * rng.uniform(0.9, 1.1, size=15)
    found = median_ratio(list(ours), list(theirs), seed=3)
    assert found == median_ratio(list(ours), list(theirs), seed=3)
    assert found.median == pytest.approx(np.median(ours / theirs))
    assert min(found.ratios) <= found.low < found.median < found.high
    assert found.high <= max(found.ratios)


def test_bootstrap_agrees_with_the_binomial():
    # The median of 9 draws from 1..9 is at most k if 5 or more of them are, each with
    # probability k / 9: 0.2 % for k = 1, 3.1 % for k = 2.
    def at_most(k: int) -> float:
        p = k / 9
        return sum(comb(9, n) * p**n * (1 - p) ** (9 - n) for n in range(5, 10))

    assert at_most(1) < 0.025 < at_most(2)
    found = median_ratio([float(value) for value in range(1, 10)], [1.0] * 9)
    assert (found.low, found.median, found.high) == (2.0, 5.0, 8.0)


@pytest.mark.parametrize(
    "correct, tried, low, high",
    [
        # Newcombe 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (0, 20, 0.0, 0.1611),
    ],
)
def test_wilson_gives_published_values(correct, tried, low, high):
    assert wilson(correct, tried) == pytest.approx((low, high), abs=1e-4)
    with pytest.raises(ValueError, match="correct"):
        wilson(tried + 1, tried)


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [
        # By hand: twice the smaller tail of fair coins, over all ways they can fall.
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (1, 3, 2 * (1 + 4) / 16),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (4, 16, 2 * (1 + 20 + 190 + 1140 + 4845) / 2**20),
    ],
)
def test_mcnemar_is_exact(ours, theirs, p):
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours) == pytest.approx(p, rel=1e-12)


def test_mcnemar_takes_large_and_refuses_negative_counts():
    assert 0 < mcnemar(400, 600) < 1e-9
    assert mcnemar(500, 500) == 1.0
    with pytest.raises(ValueError, match="mcnemar: got 1 and -1, expected counts"):
        mcnemar(1, -1)


def normal(count: int, mean: float, seed: int = 0) -> np.ndarray:
    """Return values with exactly this mean and standard deviation 1."""
    values = np.random.default_rng(seed).normal(size=count)
    return (values - values.mean()) / values.std() + mean


def test_the_interval_of_a_mean_is_that_of_normal_theory():
    count = 400
    found = estimate_mean(normal(count, 3.0))
    assert found.mean == pytest.approx(3.0)
    half = 1.96 / sqrt(count)
    assert found.low == pytest.approx(3.0 - half, abs=0.06 * half)
    assert found.high == pytest.approx(3.0 + half, abs=0.06 * half)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        # Of the 4 ways to sign 1 and 2 (0 has no sign), 3 and -3 are as far as 3 is.
        ([1.0, 0.0, 2.0], 2 / 4),
        ([-1.0, 0.0, 2.0], 1.0),
        # Sums of 2, 3 and -1: 4 is reached by 6, 4 and their opposites.
        ([2.0, 3.0, -1.0], 4 / 8),
        ([0.1, 0.2, -0.3], 1.0),
        ([0.3] * 16, 2 / 2**16),
        ([0.3] * 8 + [0.0] * 55, 2 / 2**8),
        ([0.0, 0.0], 1.0),
    ],
)
def test_the_p_value_of_few_pairs_is_the_share_of_all_sign_flips(differences, expected):
    assert estimate_difference(differences, [0] * len(differences)).p == expected


def test_random_sign_flips_agree_with_all_of_them(monkeypatch):
    count = TRIED - 3  # signs are drawn eight at a time
    differences = np.random.default_rng(3).normal(0.4, 1, count)
    exact = estimate_difference(differences, [0] * count).p
    monkeypatch.setattr(stats, "TRIED", 8)
    drawn = estimate_difference(differences, [0] * count).p
    assert drawn != exact
    assert drawn == pytest.approx(exact, abs=4 * sqrt(exact / FLIPS))


def test_random_sign_flips_count_the_observed_one():
    assert estimate_difference([1.0] * 60, [0] * 60).p == 1 / (FLIPS + 1)


def test_estimates_of_equal_values_are_points():
    found = estimate_mean([0.25] * 7)
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)
    same = estimate_difference([0.1, 0.7, 0.3], [0.1, 0.7, 0.3])
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    # Values that cancel out but for rounding are no difference, either.
    tiny = estimate_difference([0.1 + 0.2], [0.3])
    assert tiny.p == 1
    better = estimate_difference([0.6] * 15, [0.5] * 15)
    assert (better.low, better.high) == pytest.approx((0.1, 0.1))
    rounded = {"mean": 0.1, "low": 0.1, "high": 0.1, "p": 6.104e-05}
    assert better.rounded() == rounded


def test_estimates_are_seeded_and_refuse_what_is_not_paired():
    values = normal(30, 0.2)
    assert estimate_mean(values, seed=1) == estimate_mean(values, seed=1)
    assert estimate_mean(values, seed=1) != estimate_mean(values, seed=2)
    with pytest.raises(ValueError, match="bootstrap: got no values"):
        estimate_mean([])
    with pytest.raises(ValueError, match="differences: got 2 and 1 values"):
        estimate_difference([1, 2], [1])
    with pytest.raises(ValueError, match="bootstrap: got no values"):
        estimate_difference([], [])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        # By hand: 4 x .01, then 3 x .015 = .045, 2 x .02 = .04 raised to .045.
        ([0.02, 0.01, 0.6, 0.015], [0.045, 0.04, 0.6, 0.045]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.4, 1.0], [1.0, 1.0, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
    ],
)
def test_holm_corrects_for_the_number_of_tests(values, expected):
    assert holm(values) == pytest.approx(expected)


def test_holm_refuses_what_is_no_p_value():
    with pytest.raises(ValueError, match=r"holm: got 1\.5, expected p values"):
        holm([0.5, 1.5])
