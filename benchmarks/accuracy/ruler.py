"""Generates long prompts: needles in a haystack, and chains of variables."""

import random
from collections.abc import Callable

TOKENS = 48
"""Tokens of an answer, about."""
MAX_TOKENS = 256
NEEDLES = 4
"""Hidden and asked for by `needles`; `needle` asks for one of as many."""
CHAINS = 4
HOPS = 4
"""Copies along a chain of `variables`."""
_WHO = ("The baker", "A sailor", "Our neighbour", "The old clerk", "My aunt", "A boy")
_DID = ("carried", "painted", "counted", "mended", "sold", "forgot", "admired")
_WHAT = ("seven baskets", "a wooden gate", "the blue lamp", "two bicycles", "a map")
_WHEN = ("before noon", "in the rain", "last winter", "on the way home", "at dusk")
_THINGS = ("harbour", "lantern", "orchard", "violin", "glacier", "marble", "compass")
_ADJECTIVES = ("amber", "silent", "northern", "crooked", "velvet", "distant", "hollow")

Generated = tuple[str, tuple[str, ...]]
"""Prompt, and what all has to be in the answer."""


def _sentence(rng: random.Random) -> str:
    return " ".join(map(rng.choice, (_WHO, _DID, _WHAT, _WHEN))) + "."


def _hide(rng: random.Random, lines: list[str], words: int) -> str:
    """Return a haystack of `words` words with the lines, in order, at random places."""
    hay: list[str] = []
    count = sum(len(line.split()) for line in lines)
    while count < words:
        hay.append(_sentence(rng))
        count += len(hay[-1].split())
    places = sorted(rng.randrange(len(hay) + 1) for _ in lines)
    for place, line in reversed(list(zip(places, lines, strict=True))):
        hay.insert(place, line)
    return " ".join(hay)


def _needles(words: int, seed: int, asked: int) -> Generated:
    rng = random.Random(f"needles/{asked}/{words}/{seed}")
    pairs = [f"{one} {two}" for one in _ADJECTIVES for two in _THINGS]
    names = rng.sample(pairs, NEEDLES)
    codes = [str(code) for code in rng.sample(range(100_000, 1_000_000), NEEDLES)]
    lines = [f"The code of the {n} is {c}." for n, c in zip(names, codes, strict=True)]
    text = _hide(rng, lines, words)
    chosen = rng.sample(range(NEEDLES), asked)
    wanted = ", ".join(f"the {names[index]}" for index in chosen)
    prompt = (
        "Somewhere in the text below are codes. Remember them.\n\n"
        f"{text}\n\nSay the code of {wanted}, each as it stands in the text."
    )
    return prompt, tuple(codes[index] for index in chosen)


def needle(words: int, seed: int) -> Generated:
    """Return a text with several codes and a question for one."""
    return _needles(words, seed, 1)


def needles(words: int, seed: int) -> Generated:
    """Return a text with several codes and a question for all."""
    return _needles(words, seed, NEEDLES)


def variables(words: int, seed: int) -> Generated:
    """Return a text with chains of copies and a question for all names of a value."""
    rng = random.Random(f"variables/{words}/{seed}")
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = {"".join(rng.choices(letters, k=5)) for _ in range(4 * CHAINS * (HOPS + 1))}
    pool = sorted(names)
    rng.shuffle(pool)
    values = [str(value) for value in rng.sample(range(10_000, 100_000), CHAINS)]
    chains = [pool[index * (HOPS + 1) :][: HOPS + 1] for index in range(CHAINS)]
    # A chain's lines keep their order; chains are dealt into each other.
    dealt = [index for index in range(CHAINS) for _ in range(HOPS + 1)]
    rng.shuffle(dealt)
    lines, done = [], [0] * CHAINS
    for index in dealt:
        step, chain = done[index], chains[index]
        source = values[index] if step == 0 else f"the value of {chain[step - 1]}"
        lines.append(f"Let {chain[step]} be {source}.")
        done[index] += 1
    asked = rng.randrange(CHAINS)
    prompt = (
        "The text below gives values to variables, some through others.\n\n"
        f"{_hide(rng, lines, words)}\n\n"
        f"Name all {HOPS + 1} variables that have the value {values[asked]}."
    )
    return prompt, tuple(chains[asked])


GENERATORS: dict[str, Callable[[int, int], Generated]] = {
    "ruler-needle": needle,
    "ruler-needles": needles,
    "ruler-variables": variables,
}
"""(words, seed) -> prompt and answers, by name of the task."""
