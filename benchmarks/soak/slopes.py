"""Estimates how memory and the time of answers grow, beside a control."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.soak.promises import LATENCY, MEMORY, Ledger

WARM_UP = 1 / 3
"""Share of the quiet moments that is left out: allocators and caches fill first."""
FEWEST = 8
"""Quiet moments below which growth is not judged."""
RESAMPLES = 1000
TOLERANCE_BYTES = 1024
"""Growth per request beyond stock's that passes as noise: less than the smallest
object that a server could keep of a request, its id and its prompt's ids."""
SLOWER = 1.1
"""Growth of the time of quiet answers beside stock's, second half over first half, that
passes as noise: other programs move both servers, but not always alike."""
MOST_SLOWER = 1.5
"""Growth that does not pass however wide its interval is."""


@dataclass(frozen=True)
class Slope:
    """Growth in bytes per request with its 95 % bootstrap interval."""

    bytes_per_request: float
    low: float
    high: float

    def rounded(self) -> dict[str, float]:
        """Return the fields for a record."""
        return {name: round(value, 1) for name, value in vars(self).items()}


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median of the slopes between all pairs of points.

    Theil 1950 and Sen 1968: single jumps, as of an allocator that takes an arena, do
    not move it much.

    Args:
        x: [n], at least two different values.
        y: [n].
    """
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] != x[first]
    steps = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    return float(np.median(steps))


def slope(requests: Sequence[float], held: Sequence[float], seed: int = 0) -> Slope:
    """Return how a series grows.

    Args:
        requests: sent before each quiet moment; the same number of values as `held`.
        held: bytes.
        seed: of the resampling, by moments.

    Raises:
        ValueError: fewer than FEWEST values after the warm-up.
    """
    start = int(len(requests) * WARM_UP)
    x, y = np.asarray(requests, float)[start:], np.asarray(held, float)[start:]
    if len(x) < FEWEST:
        raise ValueError(f"slope: got {len(x)} moments, expected at least {FEWEST}")
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(x), size=(RESAMPLES, len(x)))
    picks = picks[[len(set(x[pick])) > 1 for pick in picks]]
    slopes = [theil_sen(x[pick], y[pick]) for pick in picks]
    low, high = np.percentile(slopes, [2.5, 97.5])
    return Slope(theil_sen(x, y), float(low), float(high))


def check_memory(
    requests: Sequence[float],
    ours: Sequence[float],
    stock: Sequence[float],
    ledger: Ledger,
) -> dict[str, dict[str, float]] | None:
    """Check that memory grows no faster than stock's.

    Args:
        requests: sent to each server before each quiet moment.
        ours: bytes that all processes of the server with policies held.

    Returns:
        Slopes of `ours`, `stock` and their `difference`; None where there are too few
        moments to judge.

    Raises:
        BrokenPromise: it grows faster.
    """
    if len(requests) - int(len(requests) * WARM_UP) < FEWEST:
        return None
    apart = slope(requests, np.subtract(ours, stock).tolist())
    said = (
        f"it grows by {apart.bytes_per_request:.0f} bytes [{apart.low:.0f}, "
        f"{apart.high:.0f}] more per request, expected at most {TOLERANCE_BYTES}"
    )
    ledger.check(MEMORY, apart.low <= TOLERANCE_BYTES, said)
    found = {"ours": slope(requests, ours), "stock": slope(requests, stock)}
    found["difference"] = apart
    return {name: each.rounded() for name, each in found.items()}


def blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw samples of a series in blocks, since neighbours are alike.

    The circular block bootstrap of Politis and Romano 1992, in blocks of the square
    root of the series: samples of single values would hide how much it wanders.

    Args:
        count: n, values of the series.

    Returns:
        [RESAMPLES, n] int64, places in the series.
    """
    length = round(count**0.5)
    starts = rng.integers(count, size=(RESAMPLES, -(-count // length), 1))
    drawn = (starts + np.arange(length)) % count
    return drawn.reshape(RESAMPLES, -1)[:, :count]


def check_latency(
    ours: Sequence[float], stock: Sequence[float], ledger: Ledger, seed: int = 0
) -> dict[str, float] | None:
    """Check that quiet answers do not get slower relative to stock's.

    Args:
        ours: median seconds of an answer, by quiet moment.
        seed: of the resampling, by runs of moments within each half.

    Returns:
        How much slower the second half was, `growth`, with its 95 % bootstrap interval,
        `low` to `high`; None if there are too few moments.

    Raises:
        BrokenPromise: the interval is above SLOWER, or the growth above MOST_SLOWER.
    """
    if len(ours) < FEWEST:
        return None
    ratios = np.divide(ours, stock)
    first, second = ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]
    rng = np.random.default_rng(seed)
    before, after = (
        np.median(half[blocks(len(half), rng)], axis=1) for half in (first, second)
    )
    low, high = np.percentile(after / before, [2.5, 97.5])
    growth = np.median(second) / np.median(first)
    limit = (
        f"{SLOWER} x by the low end" if low > SLOWER else f"{MOST_SLOWER} x in any case"
    )
    said = (
        f"they take {growth:.2f} x [{low:.2f}, {high:.2f}] as long as before, "
        f"expected at most {limit}"
    )
    ledger.check(LATENCY, low <= SLOWER and growth <= MOST_SLOWER, said)
    found = {"growth": growth, "low": low, "high": high}
    return {name: round(float(value), 3) for name, value in found.items()}
