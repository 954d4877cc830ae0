"""Runs questions on the peer, one at a time, and scores the answers."""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.accuracy import servers
from benchmarks.accuracy.client import repeated
from benchmarks.accuracy.questions import Question
from benchmarks.accuracy.results import KEY_FIELDS, Line
from benchmarks.accuracy.scoring import Equal, judge
from benchmarks.peer import catalogue
from benchmarks.peer.catalogue import FULL, PRESSES
from benchmarks.peer.facts import Place, place_of
from benchmarks.peer.process import Worker
from benchmarks.peer.prompts import Prompts
from vllm_kvpolicy.policies.names import parse, resolve

SECONDS_PER_TOKEN = 0.003
"""Of one answer on one core, until a file has lines to judge by."""
LOG_SECONDS = 30.0
"""Between two states of the progress bar where nobody looks at it."""

Asked = tuple[Line, Question]
"""Fields that name a line, and what to ask."""


def wanted_of(
    args: argparse.Namespace,
    questions: Mapping[str, Sequence[Question]],
    done: Collection[tuple],
) -> dict[str, list[Asked]]:
    """Return the missing questions, by row of the table."""
    wanted: dict[str, list[Asked]] = {}
    bounded = list(product(args.budgets, args.intervals))
    for row in catalogue.rows_of(args.policies):
        places = [(None, None)] if row == FULL else bounded
        for place, task in product(places, questions):
            for question in questions[task]:
                key = (row, *place, task, question.id, 0)
                if key not in done:
                    fields = dict(zip(KEY_FIELDS, key, strict=True))
                    fields["digest"] = question.digest
                    wanted.setdefault(row, []).append((fields, question))
    return wanted


def options_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the options of every press; those that both sides have take our value."""
    options = {}
    for policy in PRESSES:
        given = servers.options_of((policy,), "", vars(args))
        ours = resolve(parse(policy), given).options
        options[policy] = catalogue.options_of(policy, ours)
    return options


def estimate(
    wanted: Mapping[str, Sequence[Asked]], lines: Sequence[Line]
) -> tuple[int, float]:
    """Return the number of missing answers and an estimate of the seconds.

    Args:
        lines: existing answers; the estimate uses their speed if there are any.
    """
    pace = SECONDS_PER_TOKEN
    if tokens := sum(line["output_tokens"] for line in lines):
        pace = sum(line["seconds"] for line in lines) / tokens
    asked = [question for members in wanted.values() for _, question in members]
    return len(asked), pace * sum(question.expected_tokens for question in asked)


def ask_all(
    worker: Worker,
    args: argparse.Namespace,
    prompts: Prompts,
    wanted: Mapping[str, Sequence[Asked]],
    equal: Equal | None,
    refused: dict[Place, str],
) -> Iterator[Line]:
    """Yield an output line per answer, in the order of the rows.

    Args:
        refused: filled with kvpress' messages by place, whose other questions are
            skipped.
    """
    options = options_of(args)
    interval = 0.5 if sys.stderr.isatty() else LOG_SECONDS
    total = sum(map(len, wanted.values()))
    with tqdm(total=total, unit="answer", mininterval=interval) as bar:
        for row, members in wanted.items():
            bar.set_description(row)
            for fields, question in members:
                if place_of(fields) in refused:
                    continue
                reply = worker.ask(
                    {
                        "row": row,
                        "budget": fields["budget"],
                        "interval": fields["interval"],
                        "options": options,
                        "prompt": prompts.ids(question.prompt),
                        "start": prompts.start,
                        "max_tokens": args.max_tokens or question.max_tokens,
                    }
                )
                if "refused" in reply:
                    refused[place_of(fields)] = reply["refused"]
                    continue
                yield line_of(fields, question, reply, prompts, equal)
                bar.update()


def line_of(
    fields: Line,
    question: Question,
    reply: Mapping[str, Any],
    prompts: Prompts,
    equal: Equal | None,
) -> Line:
    """Return the output line of an answer; see `ask_all` and `worker`."""
    tokens = reply["tokens"]
    text = prompts.text(tokens)
    verdict = judge(question, text, reply["stopped"], equal)
    figures = ("kv_read", "kv_peak", "events", "sinks_held", "kept_mean", "revived")
    return fields | {
        "correct": verdict.correct,
        "score": round(verdict.score, 4),
        "answer": verdict.answer,
        "prompt_tokens": len(prompts.ids(question.prompt)),
        "output_tokens": len(tokens),
        "capped": not reply["stopped"],
        "repeated": repeated(tokens),
        "dropped": None,
        "expected": list(question.answers),
        "text": text,
        "seconds": reply["seconds"],
        "tries": 1,
        **{name: reply[name] for name in figures},
    }


def append(path: Path, lines: Iterator[Line]) -> list[Line]:
    """Append lines to a file one by one, and return them."""
    written = []
    with path.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            file.flush()
            written.append(line)
    return written
