"""Owns ``add``: long addition of two numbers, column by column, with carries.

A line holds the digits of one column, the lowest first, and names the digit of the sum.
The trace writes the carry that comes in and the one that goes out after the digits::

    prompt  4+7>ba;9+3>de;?ba
    trace   4+7BC>BA1;9+3CC>DE3;?BA1

A quarter of the sum's digits are asked for; the carry out of the last column falls off.
"""

from random import Random

from reasoner.families.sheet import CARRIES, Sheet


def build(rng: Random, lines: int) -> Sheet:
    """Returns the addition of two numbers of ``lines`` digits."""
    sheet = Sheet(rng, lines)
    carry = 0
    for _ in range(lines):
        left, right = rng.randrange(10), rng.randrange(10)
        out, digit = divmod(left + right + carry, 10)
        column = f"{left}+{right}"
        sheet.define(column, f"{column}{CARRIES[carry]}{CARRIES[out]}", digit)
        carry = out
    sheet.ask_some()
    return sheet
