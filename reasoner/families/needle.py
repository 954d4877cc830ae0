"""Owns ``needle``: facts hidden in filler, looked up in random order.

Before and after each fact stands a line of random consonants and digits::

    prompt  kq4tz9r;3>ba;xx7p2wd;t0ngl5v;8>de;5mrkc1b;?de?ba
    trace   ?DE8?BA3
"""

from random import Random

from reasoner.families.sheet import CONSONANTS, Sheet

FILLER = CONSONANTS + "0123456789"
FILLER_TOKENS = 7


def build(rng: Random, lines: int) -> Sheet:
    """Returns ``lines`` facts among twice as many lines of filler, all asked for."""
    sheet = Sheet(rng, lines)
    for _ in range(lines):
        before, after = ("".join(rng.choices(FILLER, k=FILLER_TOKENS)) for _ in "ab")
        sheet.literal()
        sheet.prompt[-1] = f"{before};{sheet.prompt[-1]}{after};"
    sheet.trace.clear()
    for index in rng.sample(range(lines), lines):
        sheet.ask(index)
    return sheet
