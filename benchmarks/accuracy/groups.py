"""Groups answers: by policy and task, by question, samples by majority."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.results import Line
from benchmarks.accuracy.servers import FULL, split

POOLED = "all"
"""Family of all tasks together."""

Row = dict[str, Any]
Place = tuple[str, int | None, int | None]
"""Policy, budget, interval."""
Groups = dict[tuple[Place, str], list[Line]]


def grouped(lines: Sequence[Line]) -> Groups:
    """Return lines by policy, budget and interval, then by task, in a fixed order."""
    first = {name: index for index, name in enumerate(_names(lines))}
    ordered = sorted(
        lines,
        key=lambda line: (
            line["budget"] or 0,
            line["interval"] or 0,
            first[line["policy"]],
            line["task"],
            *_natural(line),
        ),
    )
    groups: Groups = {}
    for is_pooled in (False, True):
        for line in ordered:
            place = (line["policy"], line["budget"], line["interval"])
            family = POOLED if is_pooled else line["task"]
            groups.setdefault((place, family), []).append(line)
    return groups


def _names(lines: Sequence[Line]) -> list[str]:
    """Return the policies, FULL first, an allocator after its scorer, then variants."""
    names = {line["policy"] for line in lines}

    def place(name: str) -> tuple[bool, str, str, str]:
        policy, variant = split(name)
        allocator, _, scorer = policy.rpartition("-")
        return name != FULL, scorer, allocator, variant

    return sorted(names, key=place)


def _natural(line: Line) -> tuple[int, str, int]:
    """Return a sort key of ids: numbers by size, before other names."""
    name = line["id"]
    return int(name) if name.isdigit() else 10**12, name, line["sample"]


def by_question(members: Sequence[Line]) -> dict[tuple[str, str], list[Line]]:
    """Return answers by task and id, samples in the order of the lines."""
    questions: dict[tuple[str, str], list[Line]] = {}
    for line in members:
        questions.setdefault((line["task"], line["id"]), []).append(line)
    return questions


def majority(samples: Sequence[Line], length: int | None = None) -> bool:
    """Return whether the most frequent answer of the samples is right.

    Args:
        length: answers of more tokens do not vote; None for no limit.
    """
    voters = [
        line
        for line in samples
        if line["answer"] is not None
        and (length is None or line["output_tokens"] <= length)
    ]
    if not voters:
        return False
    # most_common keeps the order of first appearance among equals.
    ((winner, _),) = Counter(line["answer"] for line in voters).most_common(1)
    return next(line["correct"] for line in voters if line["answer"] == winner)
