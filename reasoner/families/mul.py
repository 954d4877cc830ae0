"""Owns ``mul``: a long number times one digit, with carries.

The first line gives the factor to ``*``; each other line holds one digit of the
number, the lowest first, and names the digit of the product. The trace writes the
product of the two digits, then the carry that comes in and the one that goes out::

    prompt  7>*;4*>ba;9*>de;?de
    trace   7>*7;4*7:28BD>BA8;9*7:63DH>DE5;?DE5

A quarter of the product's digits are asked for; the last carry falls off.
"""

from random import Random

from reasoner.families.sheet import CARRIES, Sheet


def build(rng: Random, lines: int) -> Sheet:
    """Returns the multiplication of a number of ``lines`` digits."""
    sheet = Sheet(rng, lines)
    factor = rng.randrange(2, 10)
    sheet.prompt.append(f"{factor}>*;")
    sheet.trace.append(f"{factor}>*{factor};")
    carry = 0
    for _ in range(lines):
        digit = rng.randrange(10)
        product = digit * factor
        out, value = divmod(product + carry, 10)
        carries = CARRIES[carry] + CARRIES[out]
        sheet.define(f"{digit}*", f"{digit}*{factor}:{product:02d}{carries}", value)
        carry = out
    sheet.ask_some()
    return sheet
