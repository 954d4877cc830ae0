"""Owns ``recall``: half the lines store digits, half ask for them in random order.

prompt  3>ba;8>de;?de?ba
trace   3>BA3;8>DE8;?DE8?BA3
"""

from random import Random

from reasoner.families.sheet import Sheet


def build(rng: Random, lines: int) -> Sheet:
    """Returns a problem of ``lines`` lines, questions counted."""
    facts = (lines + 1) // 2
    sheet = Sheet(rng, facts)
    for _ in range(facts):
        sheet.literal()
    for index in rng.sample(range(facts), max(1, lines - facts)):
        sheet.ask(index)
    return sheet
