"""Kinds of values on command lines, as argparse's `type`."""

import argparse
import re

MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)


def positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer >= 1")
    return value


def memory_bytes(text: str) -> int:
    """Return bytes; 24G and 24GiB are 24 * 1024 ** 3, and 24GB is 24 * 1000 ** 3."""
    match = MEMORY.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected bytes, or a number with a unit such as 24GiB"
        )
    number, unit, binary = match.groups()
    is_decimal = text[-1] in "bB" and not binary
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1000 if is_decimal else 1024) ** power)
