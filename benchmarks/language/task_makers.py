"""Makes what a task hides in a text and what it asks at the end.

Made-up words have no meaning that a model could know and codes are random, so nothing
can be answered without the text. The words of `labels` are common, its labels are not.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

KEYS = 7
LISTED = 16
PEOPLE = 12
PAIRS = 12
CLASSES, EXAMPLES = 3, 20
LISTS, WORDS, GIVEN = 4, 12, 4
SHOWN = 3
"""Places of a text at which each line stands, but those of `labels`."""
ASKED = 7
"""Most lines of a text that are asked for."""


def _words(text: str) -> list[str]:
    return text.split()


_ADJECTIVES = _words(
    "amber silent northern crooked velvet distant hollow golden narrow frozen rusty"
)
THINGS = _words(
    "harbour lantern orchard violin glacier marble compass bridge kettle ladder saddle "
    "window basket candle hammer mirror pocket ribbon shovel temple barrel blanket "
    "button carpet cellar circle copper corner cotton desert dinner engine fabric "
    "forest garden guitar island jacket jungle kitchen letter magnet market meadow "
    "needle paddle palace pencil pillow planet powder rocket school shadow silver "
    "spider statue street summer table thunder ticket timber tunnel valley village "
    "wagon winter"
)
FIRST = _words(
    "Anna Boris Clara David Elena Felix Greta Henry Irene Jonas Karla Louis Maria Nils "
    "Olga Peter Rosa Simon Teresa Victor"
)
LAST = _words(
    "Keller Novak Brandt Costa Duval Evans Fischer Garcia Hansen Ivanov Jensen Larsen "
    "Meyer Nilsson Olsen Palmer Rossi Silva Turner Weber"
)
_CITIES = _words(
    "Lisbon Oslo Vienna Cairo Tokyo Madrid Dublin Prague Athens Warsaw Berlin Lima "
    "Havana Nairobi Seoul Toronto Boston Denver Milan Geneva"
)
_CLASSES = {
    "animals": _words(
        "sparrow horse tiger rabbit salmon eagle donkey spider monkey turtle goat wolf "
        "whale lizard camel pigeon zebra beaver hamster giraffe otter panther"
    ),
    "foods": _words(
        "bread cheese apple soup rice potato onion butter banana honey noodles carrot "
        "tomato pasta sausage yogurt spinach pancake lemon garlic walnut cabbage"
    ),
    "countries": _words(
        "France Japan Brazil Egypt Canada Norway India Mexico Poland Kenya Chile Spain "
        "Turkey Sweden Vietnam Greece Peru Ireland Austria Morocco Finland Portugal"
    ),
    "clothes": _words(
        "shirt trousers jacket sweater gloves scarf boots socks hat skirt dress coat "
        "sandals tie belt blouse jeans vest slippers hood apron pyjamas"
    ),
    "professions": _words(
        "doctor teacher lawyer plumber farmer nurse engineer baker dentist pilot "
        "tailor soldier painter journalist butcher carpenter librarian sailor chemist "
        "waiter architect miner"
    ),
}
_STARTS = _words("b bl br d dr f fl g gr k kl l m n p pl r s sk st t tr v w z")
_VOWELS = _words("a e i o u")
_ENDS = _words("b ck d ff g l m n p rk sk st t x")


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


def facts(rng: random.Random) -> Hidden:
    """Hide where people live and ask for some."""
    firsts, lasts = rng.sample(FIRST, PEOPLE), rng.sample(LAST, PEOPLE)
    cities = rng.sample(_CITIES, PEOPLE)
    begun = [f"{one} {two} lives in" for one, two in zip(firsts, lasts, strict=True)]
    return _some_of(rng, begun, [f" {city}" for city in cities], ".")


def mapping(rng: random.Random) -> Hidden:
    """Show pairs of made-up words and ask for some again."""
    words = _made_up(rng, 2 * PAIRS)
    begun = [f"{word} ->" for word in words[:PAIRS]]
    return _some_of(rng, begun, [f" {word}" for word in words[PAIRS:]], "")


def labels(rng: random.Random) -> Hidden:
    """Label words by class with made-up labels; ask for a new word of each class."""
    chosen = rng.sample(sorted(_CLASSES), CLASSES)
    words = [rng.sample(_CLASSES[kind], EXAMPLES + 1) for kind in chosen]
    lines, asked = [], []
    for members, name in zip(words, _made_up(rng, CLASSES), strict=True):
        lines += [f"{word} -> {name}" for word in members[:EXAMPLES]]
        asked.append((f"{members[EXAMPLES]} ->", f" {name}"))
    rng.shuffle(lines)
    return Hidden(tuple(lines), tuple(asked))


def lists(rng: random.Random) -> Hidden:
    """Hide lists of words and ask for the rest of some, given their first words."""
    owners = rng.sample(FIRST, LISTS)
    words = [rng.sample(THINGS, WORDS) for _ in owners]
    begun = [
        f"The list of {owner}: {', '.join(items[:GIVEN])},"
        for owner, items in zip(owners, words, strict=True)
    ]
    rest = [f" {', '.join(each[GIVEN:])}" for each in words]
    return _some_of(rng, begun, rest, ".", 3)


def _some_of(
    rng: random.Random,
    begun: list[str],
    answers: list[str],
    end: str,
    asked: int = ASKED,
) -> Hidden:
    """Return lines `BEGUN ANSWER END`, each SHOWN times, of which some are asked."""
    lines = [f"{one}{two}{end}" for one, two in zip(begun, answers, strict=True)]
    lines *= SHOWN
    rng.shuffle(lines)
    pairs = list(zip(begun, answers, strict=True))
    return Hidden(tuple(lines), tuple(rng.sample(pairs, asked)))


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
    "facts": facts,
    "mapping": mapping,
    "labels": labels,
    "lists": lists,
}
"""By name of the task."""
