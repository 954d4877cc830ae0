"""Builds the grid of a run: policies x budgets x intervals x tasks, and its shards."""

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.client import Asked
from benchmarks.accuracy.questions import EXACT, Question, questions_of
from benchmarks.accuracy.results import KEY_FIELDS, Line
from benchmarks.accuracy.servers import FULL, Setup, extra_of, split
from vllm_kvpolicy.policies.names import parse

TOKENS_PER_SECOND = 1000.0
"""Of all requests together: what the packaged model gives on 2 CPU cores. Taken until a
file has lines to judge by."""
START_SECONDS = 30.0
"""Until a server answers, about."""

Questions = Mapping[str, Sequence[Question]]


@dataclass(frozen=True)
class Cell:
    """One policy on one task: a point of the grid."""

    policy: str
    setup: Setup
    task: str


def setups_of(
    policies: Sequence[str], budgets: Sequence[int], intervals: Sequence[int]
) -> list[Setup]:
    """Return the servers of a run: FULL, then one per budget, interval, tier, variant.

    Args:
        policies: `NAME` or `NAME:VARIANT`; those that read no budget have the first.
    """
    kinds: dict[tuple[bool, str], list[str]] = {}
    for label in policies:
        if label != FULL:
            name, variant = split(label)
            kinds.setdefault((parse(name).is_ragged({}), variant), []).append(name)
    setups = [Setup((FULL,), None, None)] if FULL in policies else []
    for budget, interval in product(budgets, intervals):
        for (_, variant), names in kinds.items():
            wanted = tuple(
                name
                for name in names
                if budget == budgets[0] or not parse(name).is_unbounded
            )
            if wanted:
                setups.append(Setup(wanted, budget, interval, variant))
    return setups


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """Return the points of the grid, grouped by server."""
    setups = setups_of(args.policies, args.budgets, args.intervals)
    return [
        Cell(policy, setup, task)
        for setup in setups
        for policy, task in product(setup.policies, args.tasks)
    ]


def read_questions(args: argparse.Namespace) -> dict[str, list[Question]]:
    """Return the questions of every task.

    Raises:
        ValueError: no such task, or a worked answer longer than `--max-trace`.
    """
    questions = {
        task: questions_of(task, args.n, args.seed, args.data) for task in args.tasks
    }
    for task, members in questions.items():
        worked = [q.expected_tokens for q in members if q.judged == EXACT]
        longest = max(worked, default=0)
        if args.max_trace is not None and longest > args.max_trace:
            raise ValueError(
                f"task: expected worked answers of at most {args.max_trace} tokens, "
                f"got {longest} of {task}; make it smaller or raise --max-trace"
            )
    return questions


def shard_of(
    cells: Sequence[Cell], questions: Questions, part: int, parts: int
) -> list[Cell]:
    """Return the cells of one shard: neighbours, so that few servers start.

    Args:
        questions: by task; they determine a cell's cost.
        part: the shard, from 1 to `parts`.
        parts: number of shards, of about equal cost.
    """
    costs = [_tokens(questions[cell.task]) for cell in cells]
    total, before, mine = sum(costs), 0, []
    for cell, cost in zip(cells, costs, strict=True):
        if int((before + cost / 2) * parts / total) == part - 1:
            mine.append(cell)
        before += cost
    return mine


def asked_of(
    cells: Iterable[Cell],
    questions: Questions,
    samples: int,
    done: Collection[tuple],
    is_given: bool,
) -> dict[Setup, list[Asked]]:
    """Return the requests that are still to be sent, by server.

    Args:
        is_given: whether the server is that of `--url`.
    """
    wanted: dict[Setup, list[Asked]] = {}
    for cell in cells:
        setup = cell.setup
        extra = extra_of(cell.policy, setup, is_given)
        for question, sample in product(questions[cell.task], range(samples)):
            place = (setup.label_of(cell.policy), setup.budget, setup.interval)
            key = (*place, cell.task, question.id, sample)
            if key not in done:
                fields = dict(zip(KEY_FIELDS, key, strict=True))
                fields["digest"] = question.digest
                asked = Asked(fields, question, sample, extra)
                wanted.setdefault(setup, []).append(asked)
    return wanted


def estimate(
    wanted: Mapping[Setup, Sequence[Asked]], lines: Sequence[Line], concurrency: int
) -> tuple[int, float]:
    """Return the number of missing answers and an estimate of the seconds.

    Args:
        lines: existing answers; the estimate uses their speed if there are any.
    """
    speed = TOKENS_PER_SECOND
    if seconds := sum(line["seconds"] for line in lines):
        speed = concurrency * sum(line["output_tokens"] for line in lines) / seconds
    asked = [item for members in wanted.values() for item in members]
    tokens = _tokens([item.question for item in asked])
    return len(asked), tokens / speed + START_SECONDS * len(wanted)


def _tokens(questions: Sequence[Question]) -> int:
    return sum(question.expected_tokens for question in questions)


def read_grid(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the arguments of a YAML file.

    Args:
        path: maps names of long options, with underscores for dashes, to values.

    Raises:
        ValueError: not a mapping, or an unknown name.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"grid: cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"grid: expected a mapping in {path}, got {values!r}")
    unknown = sorted(set(map(str, values)) - set(known))
    if unknown:
        raise ValueError(f"grid: expected keys of {sorted(known)}, got {unknown}")
    return values
