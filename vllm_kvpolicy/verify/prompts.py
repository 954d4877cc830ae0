"""Texts of the requests: always the same, and each unlike the others."""

from collections.abc import Iterator
from itertools import islice

WORDS = (
    "river stone window paper garden silver market letter winter bridge candle forest "
    "hammer island jacket"
)
FACTOR, STEP, MODULUS = 1103515245, 12345, 2**31  # a linear congruential generator


def text(seed: int, num_words: int) -> str:
    """Return a text of words and numbers.

    Args:
        seed: texts of different seeds are different.
        num_words: its words; a tokenizer makes at least as many tokens of them.
    """
    return " ".join(islice(_words(seed), num_words))


def _words(seed: int) -> Iterator[str]:
    words, state = WORDS.split(), seed + 1
    while True:
        state = (state * FACTOR + STEP) % MODULUS
        yield words[(state >> 8) % len(words)]
        yield str((state >> 4) % 1000)
