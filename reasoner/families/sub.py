"""Owns ``sub``: a program over variables that subtracts modulo 10.

prompt  3>ba;8>de;ba-de>fi;?fi
trace   3>BA3;8>DE8;BA3-DE8>FI5;?FI5
"""

from random import Random

from reasoner.families.sheet import Sheet, literal_rows


def build(rng: Random, lines: int) -> Sheet:
    """Returns a problem of ``lines`` lines; no pair is subtracted twice."""
    sheet = Sheet(rng, lines)
    literals = literal_rows(rng, lines)
    seen: set[tuple[int, int]] = set()
    for row in range(lines):
        if row in literals:
            sheet.literal()
            continue
        left, right = rng.sample(range(row), 2)
        while row > 2 and (left, right) in seen:
            left, right = rng.sample(range(row), 2)
        seen.add((left, right))
        sheet.subtract(left, right)
    sheet.ask_computed(literals)
    return sheet
