"""Scores how far an answer follows the right trace, from its stored text.

Problems of the packaged model have one right trace, and its final digit hides where an
answer went wrong. Other tasks have no partial scores.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from os.path import commonprefix
from statistics import fmean

from benchmarks.accuracy.groups import by_question
from benchmarks.accuracy.questions import digest_of
from benchmarks.accuracy.results import Line
from reasoner.problems import FAMILIES, THINK_END, generate

PREFIX, LINES = "prefix", "lines"
PARTIAL = (PREFIX, LINES)
"""Names of the scores; see `scores_of`."""
LINE_END = ";"

Scores = Mapping[str, float]
"""By name, from 0 to 1."""


def scores_of(line: Line) -> Scores | None:
    """Return the partial scores of an answer.

    Returns:
        `prefix`: characters of the right trace before the first that the answer has
        otherwise, over its length; `lines`: share of the trace's lines that the answer
        has at the same place, so that a line left out costs all that follow. None if
        the task is not one of the packaged model's families.

    Raises:
        ValueError: the question is not the one that the task and the id name today.
    """
    family, _, size = line["task"].partition(":")
    if family not in FAMILIES:
        return None
    right = _trace(family, int(size), int(line["id"]), line["digest"])
    given = line["text"].partition(THINK_END)[0]
    ours, wanted = given.split(LINE_END), right.split(LINE_END)
    same = sum(a == b for a, b in zip(ours, wanted, strict=False))
    prefix = len(commonprefix([given, right]))
    return {PREFIX: prefix / len(right), LINES: same / len(wanted)}


@cache
def _trace(family: str, size: int, seed: int, digest: str) -> str:
    """Return the right trace of a problem after checking that it is the one asked."""
    problem = generate(family, size, seed)
    if digest_of(problem.prompt, (problem.answer,)) != digest:
        raise ValueError(
            f"task: {family}:{size} {seed} is another question than the one on file "
            f"(digest {digest}); its answers cannot be compared with today's trace"
        )
    return problem.trace


def scores_by_question(members: Sequence[Line]) -> dict[tuple[str, str], Scores] | None:
    """Return the scores of questions, means over samples; None if one is not known."""
    found = {}
    for question, samples in by_question(members).items():
        known = [scores for line in samples if (scores := scores_of(line))]
        if len(known) < len(samples):
            return None
        found[question] = {
            name: fmean(scores[name] for scores in known) for name in PARTIAL
        }
    return found
