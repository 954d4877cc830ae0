"""Computes latencies, paired ratios, tests and intervals of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from benchmarks.load import Completion

RESAMPLES = 10_000
CONFIDENCE = 0.95
MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its bootstrap interval.

    Attributes:
        median: median of the ratios.
        low: lower end of the interval.
        high: upper end of the interval.
        ratios: one per pair.
    """

    median: float
    low: float
    high: float
    ratios: tuple[float, ...]


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


def first_token_latencies(
    completions: Sequence[Completion],
) -> dict[str, float | None]:
    """Return times to the first token, of first and of later turns apart.

    Args:
        completions: non-empty.

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
        seed: for the resampling.
    """
    ratios = paired_ratios(ours, theirs)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(np.asarray(ratios)[picks], axis=1)
    outside = 100 * (1 - CONFIDENCE) / 2
    return Ratio(
        median=float(np.median(ratios)),
        low=percentile(medians, outside),
        high=percentile(medians, 100 - outside),
        ratios=tuple(ratios),
    )


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
