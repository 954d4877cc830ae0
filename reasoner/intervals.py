"""Owns the interval of a share."""

import math


def wilson(correct: int, tried: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the Wilson score interval of a share."""
    if not 0 <= correct <= tried or tried == 0:
        raise ValueError(f"correct: expected 0 to {tried}, got {correct}")
    share, scale = correct / tried, 1 + z * z / tried
    middle = (share + z * z / (2 * tried)) / scale
    spread = z * math.sqrt(share * (1 - share) / tried + (z / tried / 2) ** 2) / scale
    return max(0.0, middle - spread), min(1.0, middle + spread)
