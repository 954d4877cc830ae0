"""Owns the problems: seeded generation from the families, and answer checking.

A problem is a list of short lines that end in questions::

    prompt  3>ba;8>de;ba-de>fi;fi-ba>gu;?gu
    trace   3>BA3;8>DE8;BA3-DE8>FI5;FI5-BA3>GU2;?GU2
    answer  2

A template sets the marks that end a line and that ask; the trace is always written with
the first template's. A hash of the prompt decides which problems training never sees.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from itertools import product

from reasoner.families import FAMILIES
from reasoner.families.sheet import CONSONANTS, NAMES, VOWELS

__all__ = [
    "CONSONANTS",
    "FAMILIES",
    "NAMES",
    "VOWELS",
    "Problem",
    "extract_answer",
    "generate",
    "held_out",
    "is_correct",
]

THINK_END = "</think>"
TEMPLATES = tuple(product(";,.", "?@="))
"""The mark that ends a line and the mark that asks, by template number."""
HELD_OUT_TEMPLATES = (5, 7)
"""Training never sees these two pairs, though it sees each of their marks."""
TRAINED_TEMPLATES = tuple(
    index for index in range(len(TEMPLATES)) if index not in HELD_OUT_TEMPLATES
)
HELD_OUT_ONE_IN = 8
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True)
class Problem:
    """One problem with its worked solution.

    Attributes:
        prompt: what the user says, such as ``3>ba;ba>de;?de``.
        trace: the text that a correct model writes between the think marks.
        answer: one digit.
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


def generate(family: str, lines: int, seed: int, template: int = 0) -> Problem:
    """Makes one problem; the same arguments always give the same problem.

    Args:
        lines: size, in lines; at most 120, for ``recall`` at most 240.
        seed: any integer. All problems of one family and size have prompts of equal
            length in tokens, and traces too, but for the traces of ``path``.
        template: index into ``TEMPLATES``.

    Returns:
        The problem with its worked trace.

    Raises:
        ValueError: unknown family or template, or a size out of range.
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {sorted(FAMILIES)}, got {family!r}")
    if lines < 1:
        raise ValueError(f"lines: expected at least 1, got {lines}")
    if template not in range(len(TEMPLATES)):
        raise ValueError(
            f"template: expected 0 to {len(TEMPLATES) - 1}, got {template!r}"
        )
    sheet = FAMILIES[family](random.Random(f"{family}/{lines}/{seed}"), lines)
    end, ask = TEMPLATES[template]
    marks = str.maketrans(";?", end + ask)
    return Problem(
        prompt="".join(sheet.prompt).translate(marks),
        trace="".join(sheet.trace),
        answer=sheet.answer,
        family=family,
        lines=lines,
    )


def held_out(problem: Problem) -> bool:
    """Whether training must skip a problem: one in eight, by a hash of its prompt."""
    return hashlib.sha256(problem.prompt.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def extract_answer(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, or None without one."""
    found = _BOXED.findall(text)
    return found[-1].strip() if found else None


def is_correct(problem: Problem, text: str) -> bool:
    """Whether a generated text ends in the right boxed answer."""
    return extract_answer(text) == problem.answer
