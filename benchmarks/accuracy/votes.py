"""Lets samples answer together: length x width x ratio, what it gives and costs.

Length: answers longer than a share of their task's longest answer do not count, as if
cut off there. Width: the first 1, 2, 4... samples answer at once. Ratio: policy, budget
and interval. As in DMS, arXiv 2506.05345, whose lengths are limits of new runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.cost import cost_of
from benchmarks.accuracy.groups import POOLED, Groups, Place, Row, by_question, majority
from benchmarks.accuracy.results import Line
from reasoner.intervals import wilson

LENGTHS = (0.25, 0.5, 1.0)
"""Limits of the length of an answer, as shares of a task's longest one."""
COSTS = ("kv_read", "kv_peak")
MEASURES = ("accuracy", "passed")
"""What counts as right: the most frequent answer is, or at least one answer is."""

Question = tuple[str, str]
"""Task and id."""


@dataclass(frozen=True)
class Choice:
    """One length, width and ratio on the Q questions of a family.

    Attributes:
        place: policy, budget, interval.
        family: a task, or POOLED.
        share: limit of the length, one of LENGTHS.
        length: the same in tokens; None for POOLED, whose tasks have their own.
        width: samples that answer each question.
        questions: Q.
        right: by MEASURES, [Q] bool.
        costs: by COSTS, [Q] KV tokens per KV head, summed over samples; None where the
            cost of an answer is not known.
    """

    place: Place
    family: str
    share: float
    length: int | None
    width: int
    questions: tuple[Question, ...]
    right: Mapping[str, np.ndarray]
    costs: Mapping[str, np.ndarray] | None

    def row(self) -> Row:
        """Return the choice as a row of a record; see `votes_of`."""
        policy, budget, interval = self.place
        count, correct = len(self.questions), int(self.right["accuracy"].sum())
        low, high = wilson(correct, count)
        costs = dict.fromkeys(COSTS) if self.costs is None else self.costs
        return {
            "policy": policy,
            "budget": budget,
            "interval": interval,
            "family": self.family,
            "share": self.share,
            "length": self.length,
            "width": self.width,
            "problems": count,
            "correct": correct,
            "accuracy": correct / count,
            "low": low,
            "high": high,
            "passed": float(self.right["passed"].mean()),
            **{k: None if v is None else float(v.mean()) for k, v in costs.items()},
        }


def votes_of(choices: Sequence[Choice]) -> Iterator[Row]:
    """Yield a row per choice.

    `correct`, `accuracy`, `low`, `high`: of majority votes; the answer named most often
    wins, of equally many the one named first. `passed`: share of questions of which at
    least one answer is right, as if a checker chose: pass@k with k = `width`. Costs are
    means over questions, summed over samples, each up to its end or the length.
    """
    yield from (choice.row() for choice in choices)


def choices_of(groups: Groups, settings: Line) -> list[Choice]:
    """Return all choices; none with one sample.

    Tasks are pooled in POOLED, at the widths that all of a policy's tasks have.
    """
    members = [(names, lines) for names, lines in groups.items() if names[1] != POOLED]
    if not any(line["sample"] for _, lines in members for line in lines):
        return []
    longest: dict[str, int] = {}
    for (_, task), lines in members:
        most = max(line["output_tokens"] for line in lines)
        longest[task] = max(longest.get(task, 0), most)
    by_task: dict[Place, dict[str, list[Choice]]] = {}
    for (place, task), lines in members:
        found = list(_of_task(place, task, lines, settings, longest[task]))
        by_task.setdefault(place, {})[task] = found
    tasks = [c for found in by_task.values() for some in found.values() for c in some]
    pooled = [c for found in by_task.values() for c in _pooled(list(found.values()))]
    return tasks + pooled


def _of_task(
    place: Place, task: str, lines: Sequence[Line], settings: Line, longest: int
) -> Iterator[Choice]:
    """Yield the choices of a policy on a task, by width and then length."""
    questions = by_question(lines)
    samples = list(questions.values())
    most, width = min(map(len, samples)), 1
    limits = {share: max(1, round(longest * share)) for share in LENGTHS}
    costs = {n: _costs(samples, settings, most, n) for n in limits.values()}
    while width <= most:
        for share, limit in limits.items():
            known = costs[limit]
            yield Choice(
                place=place,
                family=task,
                share=share,
                length=limit,
                width=width,
                questions=tuple(questions),
                right={
                    "accuracy": np.array([majority(s[:width], limit) for s in samples]),
                    "passed": np.array([any_right(s[:width], limit) for s in samples]),
                },
                costs=None
                if known is None
                else dict(zip(COSTS, known[:, :width].sum(1).T, strict=True)),
            )
        width *= 2


def _costs(
    samples: Sequence[Sequence[Line]], settings: Line, most: int, length: int
) -> np.ndarray | None:
    """Return [Q, most, 2] costs of answers cut off at a length; None if one is not."""
    found = [
        cost_of(line, settings, length) for lines in samples for line in lines[:most]
    ]
    if None in found:
        return None
    return np.array(found, float).reshape(len(samples), most, len(COSTS))


def any_right(samples: Sequence[Line], length: int | None = None) -> bool:
    """Return whether at least one answer is right; see `groups.majority`."""
    return any(
        line["correct"] and (length is None or line["output_tokens"] <= length)
        for line in samples
    )


def _pooled(tasks: Sequence[Sequence[Choice]]) -> Iterator[Choice]:
    """Yield the choices of a policy on all its tasks together."""
    width = min(len(choices) for choices in tasks)
    for alike in zip(*(choices[:width] for choices in tasks), strict=True):
        costs = [choice.costs for choice in alike]
        yield Choice(
            place=alike[0].place,
            family=POOLED,
            share=alike[0].share,
            length=None,
            width=alike[0].width,
            questions=tuple(q for choice in alike for q in choice.questions),
            right=_joined([choice.right for choice in alike]),
            costs=None if None in costs else _joined(costs),
        )


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
