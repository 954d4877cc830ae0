"""Owns the problems: seeded generators, their worked traces, and answer checking.

A problem is a list of assignments that end in a question. A value is stored in a
name with ``>``; names are a consonant and a vowel; arithmetic is modulo 10::

    prompt  3>ba;8>de;ba>fi;fi-de>gu;?gu
    trace   3>BA3;8>DE8;BA3>FI3;FI3-DE8>GU5;?GU5
    answer  5

The trace repeats each line in upper case and writes a value directly after each
name, so every step is one look-up of a name in the trace so far. The size of a
problem is its number of lines, questions not counted except in ``recall``.
Called by the training and evaluation scripts and by benchmarks. Pure Python.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
NAMES = tuple(c + v for c in CONSONANTS for v in VOWELS)
"""All variable names: 120."""

THINK_END = "</think>"
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class Problem:
    """One problem with its worked solution.

    Attributes:
        prompt: what the user says, such as ``3>ba;ba>de;?de``.
        trace: the text that a correct model writes between the think marks.
        answer: one digit.
        family: name of the generator.
        lines: size of the problem, in lines.
    """

    prompt: str
    trace: str
    answer: str
    family: str
    lines: int

    @property
    def completion(self) -> str:
        """Everything a correct model writes after the opening think mark."""
        return f"{self.trace}{THINK_END}\\boxed{{{self.answer}}}"


class _Sheet:
    """Lines of one problem under construction, as prompt and as trace."""

    def __init__(self, rng: random.Random, num_names: int):
        """Draws the names that the lines will define.

        Args:
            rng: source of all random choices.
            num_names: names the problem defines, at most ``len(NAMES)``.
        """
        if not 1 <= num_names <= len(NAMES):
            raise ValueError(
                f"lines: expected 1 to {len(NAMES)} names, got {num_names}"
            )
        self.rng = rng
        self.names = rng.sample(NAMES, num_names)
        self.values: list[int] = []
        self.prompt: list[str] = []
        self.trace: list[str] = []

    def literal(self) -> None:
        """Adds a line that stores a random digit in the next name."""
        name, value = self.names[len(self.values)], self.rng.randrange(10)
        self._add(f"{value}>{name};", f"{value}>{name.upper()}{value};", value)

    def copy(self, source: int) -> None:
        """Adds a line that copies the value of line ``source``."""
        name, value = self.names[len(self.values)], self.values[source]
        self._add(
            f"{self.names[source]}>{name};",
            f"{self.show(source)}>{name.upper()}{value};",
            value,
        )

    def subtract(self, left: int, right: int) -> None:
        """Adds a line that stores ``left - right`` modulo 10."""
        name = self.names[len(self.values)]
        value = (self.values[left] - self.values[right]) % 10
        self._add(
            f"{self.names[left]}-{self.names[right]}>{name};",
            f"{self.show(left)}-{self.show(right)}>{name.upper()}{value};",
            value,
        )

    def ask(self, index: int) -> None:
        """Adds a question for the value of line ``index``."""
        self.prompt.append(f"?{self.names[index]}")
        self.trace.append(f"?{self.show(index)}")

    def show(self, index: int) -> str:
        """Returns the trace's form of a name: upper case, then its value."""
        return f"{self.names[index].upper()}{self.values[index]}"

    def _add(self, prompt: str, trace: str, value: int) -> None:
        self.prompt.append(prompt)
        self.trace.append(trace)
        self.values.append(value)


def _literal_rows(rng: random.Random, lines: int) -> set[int]:
    """Picks which lines store digits: the first two and others, a quarter in all."""
    first = min(lines, 2)
    others = rng.sample(range(first, lines), max(0, lines // 4 - first))
    return {*range(first), *others}


def _recall(rng: random.Random, lines: int) -> tuple[_Sheet, int]:
    """Half the lines store digits, the other half asks for them in random order."""
    facts = (lines + 1) // 2
    sheet = _Sheet(rng, facts)
    for _ in range(facts):
        sheet.literal()
    asked = rng.sample(range(facts), max(1, lines - facts))
    for index in asked:
        sheet.ask(index)
    return sheet, asked[-1]


def _copy(rng: random.Random, lines: int) -> tuple[_Sheet, int]:
    """Each line copies any earlier one, all equally likely."""
    sheet = _Sheet(rng, lines)
    literals = _literal_rows(rng, lines)
    for row in range(lines):
        if row in literals:
            sheet.literal()
        else:
            sheet.copy(rng.randrange(row))
    return _ask_one(sheet, literals)


def _hot(rng: random.Random, lines: int) -> tuple[_Sheet, int]:
    """A few first names are used all along, the others only shortly after.

    A quarter of the copies read one of the first lines // 10 lines (at least 2), which
    store digits; the rest read one of the last 6 lines.
    """
    sheet = _Sheet(rng, lines)
    num_hot = min(lines, max(2, lines // 10))
    for row in range(lines):
        if row < num_hot:
            sheet.literal()
        elif rng.random() < 0.25:
            sheet.copy(rng.randrange(num_hot))
        else:
            sheet.copy(rng.randrange(max(0, row - 6), row))
    return _ask_one(sheet, set(range(num_hot)))


def _sub(rng: random.Random, lines: int) -> tuple[_Sheet, int]:
    """Each line subtracts two different earlier values; no pair comes twice."""
    sheet = _Sheet(rng, lines)
    literals = _literal_rows(rng, lines)
    seen: set[tuple[int, int]] = set()
    for row in range(lines):
        if row in literals:
            sheet.literal()
            continue
        left, right = rng.sample(range(row), 2)
        while row > 2 and (left, right) in seen:
            left, right = rng.sample(range(row), 2)
        seen.add((left, right))
        sheet.subtract(left, right)
    return _ask_one(sheet, literals)


def _ask_one(sheet: _Sheet, literals: set[int]) -> tuple[_Sheet, int]:
    """Ends a problem with a question for a computed value, if it has one."""
    lines = len(sheet.values)
    rows = [row for row in range(lines) if row not in literals]
    index = sheet.rng.choice(rows or list(range(lines)))
    sheet.ask(index)
    return sheet, index


FAMILIES: dict[str, Callable[[random.Random, int], tuple[_Sheet, int]]] = {
    "recall": _recall,
    "copy": _copy,
    "hot": _hot,
    "sub": _sub,
}
"""Generators by family name."""


def generate(family: str, lines: int, seed: int) -> Problem:
    """Makes one problem; the same arguments always give the same problem.

    Args:
        family: a key of ``FAMILIES``.
        lines: size, in lines; at most 120, for ``recall`` at most 240.
        seed: any integer. All problems of one family and size have prompts of equal
            length in tokens, and traces too.

    Returns:
        The problem with its worked trace.

    Raises:
        ValueError: unknown family, or a size out of range.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    if lines < 1:
        raise ValueError(f"lines: expected at least 1, got {lines}")
    rng = random.Random(f"{family}/{lines}/{seed}")
    sheet, asked = FAMILIES[family](rng, lines)
    return Problem(
        prompt="".join(sheet.prompt),
        trace="".join(sheet.trace),
        answer=str(sheet.values[asked]),
        family=family,
        lines=lines,
    )


def extract_answer(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, or None without one."""
    found = _BOXED.findall(text)
    return found[-1].strip() if found else None


def is_correct(problem: Problem, text: str) -> bool:
    """Whether a generated text ends in the right boxed answer."""
    return extract_answer(text) == problem.answer
