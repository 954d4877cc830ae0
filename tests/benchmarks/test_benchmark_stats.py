"""Tests of the arithmetic: latencies, paired ratios, bootstrap, Wilson, McNemar."""

from math import comb

import numpy as np
import pytest

from benchmarks.load import Completion
from benchmarks.stats import (
    first_token_latencies,
    latencies,
    mcnemar,
    median_ratio,
    paired_ratios,
    percentile,
)
from reasoner.intervals import wilson


@pytest.mark.parametrize("percent", [0, 2.5, 50, 99, 100])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentile_interpolates_between_neighbours(percent, count):
    values = np.random.default_rng(count).normal(size=count)
    place = percent / 100 * (count - 1)
    below = int(place)
    ordered = np.sort(values)
    above = ordered[min(below + 1, count - 1)]
    expected = ordered[below] + (place - below) * (above - ordered[below])
    assert percentile(values, percent) == pytest.approx(expected)
    assert percentile(list(values), percent) == np.percentile(values, percent)


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


def test_bootstrap_of_equal_ratios_is_a_point():
    found = median_ratio([3.0, 6.0], [1.0, 2.0])
    assert (found.low, found.median, found.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "correct, tried, low, high",
    [
        # Newcombe 1998, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_values(correct, tried, low, high):
    assert wilson(correct, tried) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [
        # By hand: twice the smaller tail of fair coins, over all ways they can fall.
        (0, 0, 1.0),
        (1, 0, 1.0),
        (1, 1, 1.0),
        (2, 0, 2 / 4),
        (3, 0, 2 / 8),
        (5, 0, 2 / 32),
        (6, 0, 2 / 64),
        (5, 5, 1.0),
        (1, 3, 2 * (1 + 4) / 16),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (9, 1, 2 * (1 + 10) / 1024),
        (4, 16, 2 * (1 + 20 + 190 + 1140 + 4845) / 2**20),
    ],
)
def test_mcnemar_is_exact(ours, theirs, p):
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours) == pytest.approx(p, rel=1e-12)


def test_mcnemar_takes_large_and_refuses_negative_counts():
    assert 0 < mcnemar(400, 600) < 1e-9
    assert mcnemar(5000, 5000) == 1.0
    with pytest.raises(ValueError, match="mcnemar: got 1 and -1, expected counts"):
        mcnemar(1, -1)
