"""Owns ``copy``: each line copies any earlier one, all equally likely.

prompt  3>ba;8>de;ba>fi;fi>gu;?gu
trace   3>BA3;8>DE8;BA3>FI3;FI3>GU3;?GU3
"""

from random import Random

from reasoner.families.sheet import Sheet, literal_rows


def build(rng: Random, lines: int) -> Sheet:
    """Returns a problem of ``lines`` lines, a quarter of which store digits."""
    sheet = Sheet(rng, lines)
    literals = literal_rows(rng, lines)
    for row in range(lines):
        if row in literals:
            sheet.literal()
        else:
            sheet.copy(rng.randrange(row))
    sheet.ask_computed(literals)
    return sheet
