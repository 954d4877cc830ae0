"""Chooses the tasks of the language benchmark: those that full KV solves.

    python -m benchmarks.language.choose [--lengths 2048 4096] [--count 7]
        [--model FOLDER] [--dtype float32]

Asks full KV alone the problems of the selection seed, which no policy is measured on,
with their texts and without. A line per task and length is printed as soon as it is
known; `tasks.CHOSEN` has those with at least LEAST of the answers right, and at most
MOST of them without the text.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import pretrained
from benchmarks.accuracy.servers import FULL
from benchmarks.language import tasks
from benchmarks.language.engines import Asker, Engine, Settings, running
from benchmarks.language.task_makers import MAKERS
from benchmarks.language.texts import Encode, Text, encoder_of, read_texts

LEAST, MOST = 0.8, 0.1
"""Shares of right answers."""
DIGITS = 2
INTERVAL = 256
AT_ONCE = 4
"""Problems in an engine step."""


def shares(asker: Asker, found: list[tasks.Problem]) -> dict[str, float]:
    """Return how full KV answers problems.

    Args:
        asker: an engine that runs FULL.

    Returns:
        `right` and `loss`: means of the figures of `tasks`; `right_without` and
        `loss_without`: the same without the texts; `seconds`: of all.
    """
    began = time.monotonic()
    row = {}
    # Nothing stands before their questions but the token before texts.
    bare = [replace(problem, text_ids=problem.text_ids[:1]) for problem in found]
    for suffix, members in (("", found), ("_without", bare)):
        answered = [
            one
            for start in range(0, len(members), AT_ONCE)
            for one in tasks.measure(asker, FULL, 0, members[start : start + AT_ONCE])
        ]
        row["right" + suffix] = fmean(one.is_right.mean() for one in answered)
        row["loss" + suffix] = fmean(one.losses.mean() for one in answered)
    row["seconds"] = time.monotonic() - began
    return {name: round(float(value), DIGITS) for name, value in row.items()}


def is_solved(row: dict[str, Any]) -> bool:
    """Return whether a task is one for the benchmark.

    >>> is_solved({"right": 0.8, "right_without": 0.0})
    True
    >>> is_solved({"right": 0.9, "right_without": 0.35})
    False
    """
    return row["right"] >= LEAST and row["right_without"] <= MOST


def run(
    asker: Asker, args: argparse.Namespace, encode: Encode, texts: list[Text]
) -> None:
    """Print a line per task and length."""
    for length in args.lengths:
        for task in args.tasks:
            found = tasks.problems(
                task, length, args.count, tasks.SELECTION_SEED, encode, texts
            )
            row = shares(asker, found)
            head = {"task": task, "length": length, "count": len(found)}
            print(json.dumps(head | row | {"solved": is_solved(row)}), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096])
    parser.add_argument("--tasks", nargs="+", default=[*MAKERS], choices=MAKERS)
    parser.add_argument("--count", type=int, default=7, help="texts")
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2 135M")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    model = args.model or pretrained.make(pretrained.default_folder())
    encode, first = encoder_of(model)
    longest = max(args.lengths)
    cache = pretrained.default_folder().parent
    texts = read_texts(encode, first, tasks.PIECE, cache)
    settings = Settings(
        model=model,
        dtype=args.dtype,
        max_model_len=longest + tasks.AT_MOST + 1,
        at_once=AT_ONCE,
        budgets=(longest,),
        intervals=(INTERVAL,),
    )
    # An engine has a policy; nobody asks for it here.
    with running(Engine((FULL, "streaming"), INTERVAL), settings) as asker:
        run(asker, args, encode, texts)


if __name__ == "__main__":
    main()
