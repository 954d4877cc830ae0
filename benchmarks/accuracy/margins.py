"""Compares what methods give for a cost: Pareto fronts and the margin between two.

A method is a policy with all its budgets, intervals and variants. Its front says for
each cost the best share of questions right that any of its choices of length, width and
ratio gets for at most as much.

The margin is the mean difference between two fronts over the costs that both methods
cover, the integral between them over its length, after appendix E of DMS, arXiv
2506.05345. Deviations: fronts are steps, because no choice lies between two that were
tried; the margin has an interval; and it is cross-fitted. The best of many choices
looks too good on the questions that it was chosen by, more so for methods with more
choices. So one half of each task's questions says what a front chooses and the other
half how often that is right; the margin is the mean over both directions and SPLITS
splits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.groups import Row
from benchmarks.accuracy.servers import FULL, split
from benchmarks.accuracy.votes import COSTS, MEASURES, Choice, Question
from benchmarks.stats import CONFIDENCE

RESAMPLES = 2000
SPLITS = 5
"""Splits of the questions in halves that a margin is the mean over."""

Points = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Costs, shares to choose by and shares to judge by, [..., P] each, of P choices."""


def method_of(policy: str) -> str:
    """Return the method of `NAME` or `NAME:VARIANT`."""
    return split(policy)[0]


def front(
    rows: Sequence[Mapping[str, Any]], cost: str, measure: str = "accuracy"
) -> list[Any]:
    """Return the rows that are right more often than all that cost no more.

    Args:
        rows: with known costs, in any order.
    """
    best, kept = 0.0, []
    for row in sorted(rows, key=lambda row: (row[cost], -row[measure])):
        if row[measure] > best:
            best = row[measure]
            kept.append(row)
    return kept


def mean_height(points: Points, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the mean height of fronts over a range of costs.

    A front has, for each cost, the share to judge by of the choice with the highest
    share to choose by, the cheapest of equal ones.

    Example: points that cost 1 and 3 and have shares 0.2 and 0.6 to choose by and 0.3
    and 0.5 to judge by are worth 0.3 from 1 to 3 and 0.5 from there on, so 0.4 on
    average from 1 to 5, and 0.3 from 0 to 3 is 0.3 * 2 / 3.

    Args:
        low, high: [...], ends of the range, low < high.
    """
    order = np.argsort(points[0], axis=-1, kind="stable")
    costs, chosen, judged = (np.take_along_axis(each, order, -1) for each in points)
    before = np.maximum.accumulate(chosen, -1)[..., :-1]
    is_better = np.zeros(chosen.shape, bool)
    is_better[..., 1:] = chosen[..., 1:] > before
    places = np.where(is_better, np.arange(chosen.shape[-1]), 0)
    best = np.take_along_axis(judged, np.maximum.accumulate(places, -1), -1)
    ends = np.concatenate([costs, high[..., None]], -1)
    ends = np.clip(ends, low[..., None], high[..., None])
    return (best * np.diff(ends, axis=-1)).sum(-1) / (high - low)


def margin(ours: Points, theirs: Points) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean difference of two fronts, and the range that it is the mean of.

    The range goes from the cost at which both methods have a choice to the cost above
    which one of them has none.

    Returns:
        Margin, low and high, [...] each; NaN for the margin where no range is shared.
    """
    costs = ours[0], theirs[0]
    low = np.maximum(*(each.min(-1) for each in costs))
    high = np.minimum(*(each.max(-1) for each in costs))
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = mean_height(ours, low, high) - mean_height(theirs, low, high)
    return np.where(low < high, difference, np.nan), low, high


def margins_of(choices: Sequence[Choice]) -> Iterator[Row]:
    """Yield the margins of methods over FULL, by family, cost and measure.

    `cost`: one of COSTS; `measure`: one of MEASURES; `margin`: in shares; `low`,
    `high`: its 95 % percentile bootstrap interval over questions, drawn within each
    task, the same for both methods; `from`, `to`: the costs that both cover, between
    which the margin is the mean; `problems`: questions that both answered. Methods with
    an unknown cost are left out, those that share no range of costs with FULL, and
    families of one question, which has no halves.
    """
    families: dict[str, dict[str, list[Choice]]] = {}
    for choice in choices:
        methods = families.setdefault(choice.family, {})
        methods.setdefault(method_of(choice.place[0]), []).append(choice)
    for family, methods in families.items():
        for method, ours in methods.items():
            known = [*ours, *methods.get(FULL, ())]
            if (
                method == FULL
                or FULL not in methods
                or any(choice.costs is None for choice in known)
            ):
                continue
            for row in _compared(ours, methods[FULL]):
                yield {"method": method, "against": FULL, "family": family, **row}


def _compared(ours: Sequence[Choice], theirs: Sequence[Choice]) -> Iterator[Row]:
    """Yield what there is to say of two methods on a family."""
    every = [*ours, *theirs]
    questions = [
        question
        for question in every[0].questions
        if all(question in choice.questions for choice in every)
    ]
    weights, halves = _weights(questions), _halves(questions)
    for cost in COSTS:
        for measure in MEASURES:
            points = [
                _points(some, questions, weights, halves, cost, measure)
                for some in (ours, theirs)
            ]
            found, low, high = margin(*points)
            values = found.mean(0)
            if np.isnan(values[0]):
                continue
            ends = np.nanquantile(
                values[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
            )
            yield {
                "cost": cost,
                "measure": measure,
                "problems": len(questions),
                "margin": round(float(values[0]), 4),
                "low": round(float(ends[0]), 4),
                "high": round(float(ends[1]), 4),
                "from": round(float(low[0, 0]), 3),
                "to": round(float(high[0, 0]), 3),
            }


def _weights(questions: Sequence[Question], seed: int = 0) -> np.ndarray:
    """Return [1 + RESAMPLES, Q] how often a question counts, first each once.

    Each resample has as many questions of a task as there are.
    """
    rng = np.random.default_rng(seed)
    tasks = np.array([task for task, _ in questions])
    weights = np.ones((1 + RESAMPLES, len(questions)))
    for task in dict.fromkeys(tasks.tolist()):
        own = np.flatnonzero(tasks == task)
        even = np.full(len(own), 1 / len(own))
        weights[1:, own] = rng.multinomial(len(own), even, RESAMPLES)
    return weights / len(questions)


def _halves(questions: Sequence[Question], seed: int = 1) -> np.ndarray:
    """Return [2 * SPLITS, Q] which questions choose; the others judge.

    Each task is cut in halves; both of them choose, one in the first SPLITS rows.
    """
    rng = np.random.default_rng(seed)
    tasks = np.array([task for task, _ in questions])
    chooses = np.zeros((SPLITS, len(questions)), bool)
    for task in dict.fromkeys(tasks.tolist()):
        own = np.flatnonzero(tasks == task)
        for row in chooses:
            # Which half has the odd question is left to chance.
            row[rng.permutation(own)[rng.integers(2) :: 2]] = True
    return np.concatenate([chooses, ~chooses])


def _points(
    choices: Sequence[Choice],
    questions: Sequence[Question],
    weights: np.ndarray,
    halves: np.ndarray,
    cost: str,
    measure: str,
) -> Points:
    """Return the points of choices, [2 * SPLITS, 1 + RESAMPLES, P] each.

    Costs are those of all questions. A share is NaN where a resample has no question
    of a half.
    """
    costs, right = [], []
    for choice in choices:
        place = {question: index for index, question in enumerate(choice.questions)}
        own = [place[question] for question in questions]
        assert choice.costs is not None
        costs.append(choice.costs[cost][own])
        right.append(choice.right[measure][own])
    both = weights @ np.stack(costs, -1)
    chosen = _shares(np.stack(right, -1), weights, halves)
    judged = _shares(np.stack(right, -1), weights, ~halves)
    return np.broadcast_to(both, chosen.shape), chosen, judged


def _shares(right: np.ndarray, weights: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Return shares of [Q, P] right answers on halves of the questions."""
    own = weights * halves[:, None]
    with np.errstate(invalid="ignore"):
        return (own @ right) / own.sum(-1, keepdims=True)
