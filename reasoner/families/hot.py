"""Owns ``hot``: repeated sub-results, some used all along and others only soon after.

A quarter of the copies read one of the first lines // 10 lines (at least 2), which
store digits; the rest read one of the last 6 lines. Written as ``copy`` is.
"""

from random import Random

from reasoner.families.sheet import Sheet


def build(rng: Random, lines: int) -> Sheet:
    """Returns a problem of ``lines`` lines."""
    sheet = Sheet(rng, lines)
    num_hot = min(lines, max(2, lines // 10))
    for row in range(lines):
        if row < num_hot:
            sheet.literal()
        elif rng.random() < 0.25:
            sheet.copy(rng.randrange(num_hot))
        else:
            sheet.copy(rng.randrange(max(0, row - 6), row))
    sheet.ask_computed(set(range(num_hot)))
    return sheet
