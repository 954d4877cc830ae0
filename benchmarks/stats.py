"""Computes latencies, paired ratios, tests and intervals of a comparison."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import comb

import numpy as np

from benchmarks.load import Completion

RESAMPLES = 10_000
FLIPS = 100_000
"""Sign flips drawn where there are too many to try all."""
TRIED = 16
"""Most differences of which all sign flips are tried."""
CONFIDENCE = 0.95
TOLERANCE = 1e-12
"""Up to which values and means are equal but for rounding."""
MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its bootstrap interval.

    Attributes:
        ratios: one per pair.
    """

    median: float
    low: float
    high: float
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def rounded(self) -> dict[str, float]:
        """Return the fields for a record of shares, to a hundredth of a point."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean of paired differences; `p` is two-sided."""

    p: float

    def rounded(self) -> dict[str, float]:
        """Return the fields for a record; `p` has four digits, however small."""
        return super().rounded() | {"p": float(f"{self.p:.4g}")}


def latencies(completions: Sequence[Completion]) -> dict[str, float]:
    """Return throughput and latencies of requests that ran together.

    Args:
        completions: non-empty, each with at least 2 tokens.

    Returns:
        `output_tok_s`: all output tokens / seconds from the first request sent to the
        last token. `ttft_ms`: time to first token, median over requests. `tpot_ms`:
        time per further token, median over requests. `itl_p50_ms`, `itl_p99_ms`: gaps
        between tokens, over all requests; 0 inside a chunk. `wall_s`: the seconds.
    """
    wall = max(c.arrivals[-1] for c in completions)
    wall -= min(c.started for c in completions)
    first = [c.arrivals[0] - c.started for c in completions]
    gaps = np.concatenate([np.diff(c.arrivals) for c in completions])
    further = [np.mean(np.diff(c.arrivals)) for c in completions]
    tokens = sum(len(c.token_ids) for c in completions)
    return {
        "output_tok_s": tokens / wall,
        "ttft_ms": MILLISECONDS * float(np.median(first)),
        "tpot_ms": MILLISECONDS * float(np.median(further)),
        "itl_p50_ms": MILLISECONDS * percentile(gaps, 50),
        "itl_p99_ms": MILLISECONDS * percentile(gaps, 99),
        "wall_s": wall,
    }


def first_token_latencies(completions: Sequence[Completion]) -> dict[str, float | None]:
    """Return times to the first token, of first and of later turns apart.

    Returns:
        `ttft_p99_ms`: of all; `ttft_first_ms`, `ttft_first_p99_ms`: median and 99th
        percentile of first turns; `ttft_later_ms`, `ttft_later_p99_ms`: of the others,
        None if there are none.
    """
    waits = [(c.turn > 1, c.arrivals[0] - c.started) for c in completions]
    row: dict[str, float | None] = {
        "ttft_p99_ms": MILLISECONDS * percentile([wait for _, wait in waits], 99)
    }
    for name, wanted in (("first", False), ("later", True)):
        some = [wait for is_later, wait in waits if is_later == wanted]
        for column, percent in ((f"ttft_{name}_ms", 50), (f"ttft_{name}_p99_ms", 99)):
            row[column] = MILLISECONDS * percentile(some, percent) if some else None
    return row


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Return a percentile, interpolated linearly between neighbours."""
    return float(np.percentile(values, percent))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours / theirs, pair by pair.

    Raises:
        ValueError: no pairs, or unequal numbers of values.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(
            f"ratios: got {len(ours)} and {len(theirs)} values, expected equally many"
        )
    return [a / b if b else float("nan") for a, b in zip(ours, theirs, strict=True)]


def median_ratio(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0
) -> Ratio:
    """Return the median of paired ratios with its percentile bootstrap interval.

    Args:
        ours: one value per pair.
        theirs: divides the value of the same pair.
    """
    ratios = paired_ratios(ours, theirs)
    medians = np.median(np.asarray(ratios)[_picks(len(ratios), seed)], axis=1)
    low, high = _ends(medians)
    return Ratio(float(np.median(ratios)), low, high, tuple(ratios))


def estimate_mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return a mean with its percentile bootstrap interval.

    Args:
        values: one per question. Equal ones give an interval of no width.

    Raises:
        ValueError: no values.
    """
    low, high = _ends(_means(values, seed))
    return Estimate(float(np.mean(values)), low, high)


def estimate_difference(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0
) -> Difference:
    """Return the mean of ours - theirs with interval and p value, pair by pair.

    The interval is the percentile bootstrap's over pairs. The p value is that of
    Fisher's randomisation test (The Design of Experiments, 1935, section 21): if the
    two do not differ, each difference may as well have the other sign. It is the share
    of sign flips whose mean is at least as far from 0. All flips are tried for up to
    TRIED differences other than 0, else FLIPS random ones, the observed one counted as
    one more of them (Phipson and Smyth 2010). It is 1 if all differences are 0, and
    `mcnemar` of differences of 1 and -1. Interval and p value may disagree about 0.

    Args:
        ours: one value per pair.
        theirs: subtracted from the value of the same pair.

    Raises:
        ValueError: no pairs, or unequal numbers of values.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"differences: got {len(ours)} and {len(theirs)} values, expected equally "
            "many"
        )
    differences = np.subtract(ours, theirs)
    low, high = _ends(_means(differences, seed))
    p = _sign_flip(differences, seed)
    return Difference(float(np.mean(differences)), low, high, p)


def _sign_flip(differences: np.ndarray, seed: int) -> float:
    """Return the two-sided p value of the sign-flip test of a mean of 0."""
    # Values that differ by rounding only do not differ.
    values = differences[np.abs(differences) > TOLERANCE]
    least = abs(values.sum()) - TOLERANCE * max(1, len(values))
    if len(values) <= TRIED:
        return float(np.mean(np.abs(_signed_sums(values)) >= least))
    sums = np.zeros(FLIPS)
    groups = np.pad(values, (0, -len(values) % 8)).reshape(-1, 8)
    for group, signs in zip(groups, _bytes(len(groups), seed), strict=True):
        sums += _signed_sums(group)[signs]
    return (int(np.sum(np.abs(sums) >= least)) + 1) / (FLIPS + 1)


def _signed_sums(values: np.ndarray) -> np.ndarray:
    """Return the sums with every choice of signs, [2 ** len(values)]."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


@lru_cache(maxsize=8)
def _bytes(count: int, seed: int) -> np.ndarray:
    """Return random bytes, the signs of eight values each, [count, FLIPS]."""
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(count, FLIPS), dtype=np.uint8)


def _means(values: Sequence[float] | np.ndarray, seed: int) -> np.ndarray:
    """Return the means of resamples, [RESAMPLES]."""
    if not len(values):
        raise ValueError("bootstrap: got no values, expected at least one")
    return np.asarray(values, float)[_picks(len(values), seed)].mean(axis=1)


@lru_cache(maxsize=8)
def _picks(count: int, seed: int) -> np.ndarray:
    """Return the values in each resample, [RESAMPLES, count]."""
    rng = np.random.default_rng(seed)
    return rng.integers(count, size=(RESAMPLES, count))


def _ends(resampled: np.ndarray) -> tuple[float, float]:
    """Return the ends of the percentile interval."""
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(resampled, [outside, 100 - outside])
    return float(low), float(high)


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Return McNemar's exact two-sided p-value of paired yes-or-no results.

    Args:
        only_ours: pairs in which only the first said yes.
        only_theirs: pairs in which only the second did.

    Returns:
        The chance that a fair coin splits the differing pairs at least as unevenly; 1
        if none differ. With 10 and 2 it is 0.039.

    Raises:
        ValueError: a negative count.
    """
    if min(only_ours, only_theirs) < 0:
        raise ValueError(
            f"mcnemar: got {only_ours} and {only_theirs}, expected counts >= 0"
        )
    pairs = only_ours + only_theirs
    tail = sum(comb(pairs, n) for n in range(min(only_ours, only_theirs) + 1))
    return min(1.0, 2 * tail / 2**pairs)


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, in the same order.

    Holm 1979: the smallest of m is multiplied by m, the next by m - 1 and so on; none
    gets smaller than one before it, or larger than 1. Those below a level keep the
    chance of any false finding below that level, whatever the tests have in common.

    Raises:
        ValueError: a value below 0 or above 1.
    """
    wrong = [value for value in values if not 0 <= value <= 1]
    if wrong:
        raise ValueError(f"holm: got {wrong[0]}, expected p values of 0 to 1")
    corrected, largest = [0.0] * len(values), 0.0
    order = sorted(range(len(values)), key=values.__getitem__)
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected
