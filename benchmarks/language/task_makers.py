"""Makes what a task hides in a text and what it asks at the end.

Made-up words have no meaning that a model could know and codes are random, so nothing
can be answered without the text.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

KEYS = 7
LISTED = 16
PAIRS = 12
SHOWN = 3
"""Places of a text at which each line stands."""
ASKED = 7
"""Lines of a text that are asked for."""
VOTES = 3
"""Lines for the right answer of `votes`; one line is for another."""


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


_ADJECTIVES = words(
    "amber silent northern crooked velvet distant hollow golden narrow frozen rusty"
)
THINGS = words(
    "harbour lantern orchard violin glacier marble compass bridge kettle ladder saddle "
    "window basket candle hammer mirror pocket ribbon shovel temple barrel blanket "
    "button carpet cellar circle copper corner cotton desert dinner engine fabric "
    "forest garden guitar island jacket jungle kitchen letter magnet market meadow "
    "needle paddle palace pencil pillow planet powder rocket school shadow silver "
    "spider statue street summer table thunder ticket timber tunnel valley village "
    "wagon winter"
)
_STARTS = words("b bl br d dr f fl g gr k kl l m n p pl r s sk st t tr v w z")
_VOWELS = "aeiou"
_ENDS = words("b ck d ff g l m n p rk sk st t x")


@dataclass(frozen=True)
class Hidden:
    """What a text hides and what is asked.

    Attributes:
        lines: to be hidden, in order.
        asked: in order, the beginning of a line and what has to follow, with the space
            before it.
    """

    lines: tuple[str, ...]
    asked: tuple[tuple[str, str], ...]


def keys(rng: random.Random) -> Hidden:
    """Hide codes in sentences and ask for them."""
    pairs = [f"{one} {two}" for one in _ADJECTIVES for two in THINGS]
    names = rng.sample(pairs, KEYS)
    begun = [f"The code of the {name} is" for name in names]
    return _some_of(rng, begun, [f" {_code(rng, 5)}" for _ in names], ".")


def lookup(rng: random.Random) -> Hidden:
    """Hide the lines `name: code` of a list and ask for some."""
    begun = [f"{name}:" for name in _made_up(rng, LISTED)]
    return _some_of(rng, begun, [f" {_code(rng, 4)}" for _ in begun], "")


def mapping(rng: random.Random) -> Hidden:
    """Show pairs of made-up words and ask for some again."""
    made = _made_up(rng, 2 * PAIRS)
    begun = [f"{word} ->" for word in made[:PAIRS]]
    return _some_of(rng, begun, [f" {word}" for word in made[PAIRS:]], "")


def votes(rng: random.Random) -> Hidden:
    """Have people vote for two things each, and ask what has most votes of each.

    After the frequent words of RULER (Hsieh et al., 2024).
    """
    made = [word.capitalize() for word in _made_up(rng, ASKED)]
    lines, asked = [], []
    for name in made:
        more, fewer = rng.sample(THINGS, 2)
        lines += [f"{name} votes for the {more}."] * VOTES
        lines.append(f"{name} votes for the {fewer}.")
        asked.append((f"Most votes of {name} are for the", f" {more}"))
    rng.shuffle(lines)
    return Hidden(tuple(lines), tuple(rng.sample(asked, len(asked))))


def _some_of(
    rng: random.Random, begun: list[str], answers: list[str], end: str
) -> Hidden:
    """Return lines `BEGUN ANSWER END`, each SHOWN times, of which ASKED are asked."""
    lines = [f"{one}{two}{end}" for one, two in zip(begun, answers, strict=True)]
    lines *= SHOWN
    rng.shuffle(lines)
    pairs = list(zip(begun, answers, strict=True))
    return Hidden(tuple(lines), tuple(rng.sample(pairs, ASKED)))


def _code(rng: random.Random, digits: int) -> str:
    return "".join(rng.choices("0123456789", k=digits))


def _made_up(rng: random.Random, count: int) -> list[str]:
    """Return different words of two syllables."""
    found: dict[str, None] = {}
    while len(found) < count:
        parts = (_STARTS, _VOWELS, _STARTS, _VOWELS, _ENDS)
        found["".join(map(rng.choice, parts))] = None
    return list(found)


MAKERS: dict[str, Callable[[random.Random], Hidden]] = {
    "keys": keys,
    "lookup": lookup,
    "mapping": mapping,
    "votes": votes,
}
"""By name of the task."""
