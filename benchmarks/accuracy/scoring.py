"""Scores answers.

If it is installed and requested, `math-verify` compares LaTeX answers that are not
plainly equal; the settings of a run record this.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.accuracy.answers import last_boxed, normal_form, same_answer
from benchmarks.accuracy.questions import ALL_IN_TEXT, EXACT, MATH, Question

Equal = Callable[[str, str], bool]
"""(given, expected) -> whether they are the same by algebra."""


@dataclass(frozen=True)
class Verdict:
    """The score of an answer.

    Attributes:
        score: from 0 to 1. The share of the answers found where all were wanted, the
            F1 of words where one of several was, else 1 for right and 0 for wrong.
        answer: the part that counts as the answer, for votes; None if there is none.
    """

    correct: bool
    score: float
    answer: str | None


def judge(
    question: Question, text: str, is_whole: bool, equal: Equal | None = None
) -> Verdict:
    """Score an answer.

    Args:
        is_whole: the model ended the answer; False if a limit did.
        equal: compares LaTeX answers that are not plainly equal; None: they differ.
    """
    if not is_whole:
        return Verdict(False, 0.0, None)
    if question.judged in (EXACT, MATH):
        return _judge_box(question, text, equal)
    words = _words(text)
    found = [f" {_words(answer)} " in f" {words} " for answer in question.answers]
    if question.judged == ALL_IN_TEXT:
        return Verdict(all(found), sum(found) / len(found), words)
    score = max(_f1(words, _words(answer)) for answer in question.answers)
    return Verdict(any(found), score, words)


def _judge_box(question: Question, text: str, equal: Equal | None) -> Verdict:
    (expected,) = question.answers
    boxed = last_boxed(text)
    if boxed is None:
        return Verdict(False, 0.0, None)
    if question.judged == EXACT:
        return Verdict(boxed == expected, float(boxed == expected), boxed)
    right = same_answer(boxed, expected)
    if not right and equal is not None:
        right = equal(boxed, expected)
    return Verdict(right, float(right), normal_form(boxed))


def _words(text: str) -> str:
    """Return the words of a text in lower case, one space apart, nothing else."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _f1(given: str, expected: str) -> float:
    ours, theirs = Counter(given.split()), Counter(expected.split())
    shared = sum((ours & theirs).values())
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def math_verify() -> tuple[str, Equal]:
    """Return the version of `math-verify` and its equality.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import math_verify as package
    except ImportError:
        raise ValueError(
            "math-verify: expected it for --math-verify, got no such package; "
            "pip install math-verify, or leave the flag out"
        ) from None
    config: Any = package.LatexExtractionConfig()
    number: Any = package.ExprExtractionConfig()

    def parsed(answer: str) -> list:
        return package.parse(f"${answer}$", extraction_config=[config, number])

    def equal(given: str, expected: str) -> bool:
        return bool(package.verify(parsed(expected), parsed(given)))

    return version("math-verify"), equal
