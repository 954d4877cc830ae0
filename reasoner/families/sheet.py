"""Owns the sheet: a problem under construction, as prompt and as worked trace.

Every family writes in the same way, because small models learn it in minutes:

* names are a consonant and a vowel, one token each, upper case in the trace;
* a value stands directly after the name that holds it;
* a line ends in a name (prompt) or in a name and its value (trace), so the next line
  of the prompt is found by the name two tokens back;
* carries are consonants of their own, never digits.
"""

from random import Random

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
NAMES = tuple(c + v for c in CONSONANTS for v in VOWELS)
"""All variable names: 120."""
CARRIES = "BCDFGHJKL"
"""How the trace writes a carry of 0 to 8. Two of them never form a name."""


class Sheet:
    """Lines of one problem under construction.

    Attributes:
        names: the names to define, in the order of their lines.
        values: digits of the names defined so far.
        answer: the last value asked for.
    """

    def __init__(self, rng: Random, num_names: int):
        """Draws the names that the lines will define.

        Args:
            num_names: names the problem defines, at most ``len(NAMES)``.

        Raises:
            ValueError: more names than there are.
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
        self.answer = ""

    def define(self, prompt: str, trace: str, value: int) -> None:
        """Adds a line that stores ``value`` in the next name.

        Args:
            prompt: the line up to the name.
            trace: the same in the trace.
            value: digit, written directly after the trace's name.
        """
        name = self.names[len(self.values)]
        self.prompt.append(f"{prompt}>{name};")
        self.trace.append(f"{trace}>{name.upper()}{value};")
        self.values.append(value)

    def literal(self) -> None:
        """Adds a line that stores a random digit in the next name."""
        value = self.rng.randrange(10)
        self.define(str(value), str(value), value)

    def copy(self, source: int) -> None:
        """Adds a line that copies the value of line ``source``."""
        self.define(self.names[source], self.show(source), self.values[source])

    def subtract(self, left: int, right: int) -> None:
        """Adds a line that stores ``left - right`` modulo 10."""
        self.define(
            f"{self.names[left]}-{self.names[right]}",
            f"{self.show(left)}-{self.show(right)}",
            (self.values[left] - self.values[right]) % 10,
        )

    def ask(self, index: int) -> None:
        """Adds a question for the value of line ``index``, the answer so far."""
        self.prompt.append(f"?{self.names[index]}")
        self.trace.append(f"?{self.show(index)}")
        self.answer = str(self.values[index])

    def ask_computed(self, given: set[int]) -> None:
        """Asks for one value at random, not one of the lines ``given`` if it can."""
        rows = range(len(self.values))
        self.ask(self.rng.choice([row for row in rows if row not in given] or rows))

    def ask_some(self) -> None:
        """Asks for a quarter of the values, at least one, in random order."""
        rows = range(len(self.values))
        for index in self.rng.sample(rows, max(1, len(rows) // 4)):
            self.ask(index)

    def show(self, index: int) -> str:
        """Returns the trace's form of a name: upper case, then its value."""
        return f"{self.names[index].upper()}{self.values[index]}"


def literal_rows(rng: Random, lines: int) -> set[int]:
    """Picks which lines store digits: the first two and others, a quarter in all."""
    first = min(lines, 2)
    others = rng.sample(range(first, lines), max(0, lines // 4 - first))
    return {*range(first), *others}
