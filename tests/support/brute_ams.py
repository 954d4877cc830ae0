"""AMS for one row, written as loops over tokens: slow, and easy to check by eye.

It shares no code with the package. Only the fixed-point rounding is the same by design,
since it is part of what the selection is defined to be.
"""

import math


def normalise(values: list[float]) -> list[float]:
    """Shift by 1e-12, round to 2^-32 of the maximum, scale to sum 1."""
    positive = [max(v, 0.0) + 1e-12 if not math.isnan(v) else 1e-12 for v in values]
    highest = max(positive)
    units = [round(v / highest * 2**32) for v in positive]
    total = sum(units)
    return [unit / total for unit in units]


def fixed_mass(
    usage: list[float], credit: list[float] | None, decay: float, mix: float
) -> tuple[list[int], list[float]]:
    """Mass in units of 2^-28, and the new credit."""
    mass = normalise(usage)
    if credit is None:
        updated, mixed = [(1 - decay) * m for m in mass], mass
    else:
        updated = [
            decay * c + (1 - decay) * m for c, m in zip(credit, mass, strict=True)
        ]
        smooth = normalise(updated)
        mixed = [mix * m + (1 - mix) * s for m, s in zip(mass, smooth, strict=True)]
    return [round(m * 2**28) for m in mixed], updated


def segments(mass: list[int], step: float, low: int, high: int) -> list[list[int]]:
    """Half-open segments: cut at thresholds, split the long, merge the short."""
    n = len(mass)
    cuts = set()
    k = 1
    while k * step < 1 - 1e-12:
        threshold = round(k * (step * 2**28))
        running = 0
        cut = n
        for i, m in enumerate(mass):
            running += m
            if running >= threshold:
                cut = i
                break
        cuts.add(min(max(cut, 1), max(n - 1, 1)))
        k += 1
    edges = sorted({0, n} | {cut for cut in cuts if cut < n})
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        while end - start > high:
            pieces.append([start, start + high])
            start += high
        pieces.append([start, end])
    merged: list[list[int]] = []
    for start, end in pieces:
        if merged and merged[-1][1] - merged[-1][0] < low:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged


def deal(capacity: list[int], total: int) -> list[int]:
    """One token at a time, round and round, from the first segment on."""
    given = [0] * len(capacity)
    while total > 0 and sum(given) < sum(capacity):
        for i, most in enumerate(capacity):
            if total > 0 and given[i] < most:
                given[i] += 1
                total -= 1
    return given


def share(capacity: list[int], mass: list[int], total: int, floor: int) -> list[int]:
    """Quotas that add up to `total`."""
    base = [min(floor, c) for c in capacity]
    if sum(base) > total:
        taken = deal([max(b - 1, 0) for b in base], sum(base) - total)
        base = [b - t for b, t in zip(base, taken, strict=True)]
        while sum(base) > total:
            poorest = min((m, i) for i, m in enumerate(mass) if base[i] > 0)[1]
            base[poorest] = 0
        return base
    rest, whole = total - sum(base), max(sum(mass), 1)
    quota = [
        min(b + round(rest * m / whole), c)
        for b, m, c in zip(base, mass, capacity, strict=True)
    ]
    if sum(quota) > total:
        taken = deal(
            [q - b for q, b in zip(quota, base, strict=True)], sum(quota) - total
        )
        return [q - t for q, t in zip(quota, taken, strict=True)]
    given = deal(
        [c - q for c, q in zip(capacity, quota, strict=True)], total - sum(quota)
    )
    return [q + g for q, g in zip(quota, given, strict=True)]


def best(candidates: list[int], score: list[float], count: int) -> list[int]:
    """Highest scores; NaN is lowest; of equal ones the later position."""

    def key(i: int) -> tuple[float, int]:
        return (-math.inf if math.isnan(score[i]) else score[i], i)

    return sorted(candidates, key=key, reverse=True)[:count]


def brute_choose(
    usage: list[float],
    score: list[float],
    must: set[int],
    budget: int,
    config: dict,
    credit: list[float] | None,
) -> tuple[list[int], list[list[int]], list[int], list[float]]:
    """Keep list, segments, quotas and updated credit of one row."""
    mass, updated = fixed_mass(usage, credit, config["ema_decay"], config["ema_mix"])
    if config["segments"] == "fixed":
        block = config["fixed_segment"]
        starts = range(0, len(mass), block)
        cut = [[start, min(start + block, len(mass))] for start in starts]
    else:
        cut = segments(
            mass, config["segment_mass"], config["min_segment"], config["max_segment"]
        )
    free = [[i for i in range(s, e) if i not in must] for s, e in cut]
    capacity, room = [len(part) for part in free], budget - len(must)
    if config["quotas"] == "uniform":
        quotas = deal(capacity, room)
    else:
        weights = [sum(mass[i] for i in part) for part in free]
        quotas = share(capacity, weights, room, config["min_quota"])
    keep = set(must)
    for part, quota in zip(free, quotas, strict=True):
        keep.update(best(part, score, quota))
    return sorted(keep), cut, quotas, updated
