"""Runs the questions on our server: answers, and tokens per second."""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.accuracy import grid
from benchmarks.accuracy.__main__ import client_of
from benchmarks.accuracy.client import Asked
from benchmarks.accuracy.questions import Question
from benchmarks.accuracy.results import Line
from benchmarks.accuracy.scoring import Equal
from benchmarks.accuracy.servers import Setup, count_events, serving
from benchmarks.printing import log

Files = Mapping[int, Path]
"""Concurrency -> output file."""
Rounds = dict[tuple[str, int], list[Asked]]
"""Policy and concurrency -> what is still to ask."""
TOKENS_PER_SECOND = 300.0
"""Of one request alone, about, until there is a file to judge by; of several together
at most what grid.TOKENS_PER_SECOND says."""
DTYPE = "float32"
"""Of the harness' servers; the peer's has to be the same."""
START_SECONDS = 60.0
"""Until a server answers and is warm, about."""


def wanted_of(
    args: argparse.Namespace,
    questions: Mapping[str, Sequence[Question]],
    done: Mapping[int, set[tuple]],
) -> dict[Setup, Rounds]:
    """Return the missing rounds, by server, policy and concurrency.

    Args:
        done: keys of existing lines, by concurrency.
    """
    wanted: dict[Setup, Rounds] = {}
    for concurrency, keys in done.items():
        cells = grid.cells_of(args)
        left = grid.asked_of(cells, questions, 1, keys, bool(args.url))
        for setup, members in left.items():
            for asked in members:
                place = (asked.key["policy"], concurrency)
                wanted.setdefault(setup, {}).setdefault(place, []).append(asked)
    return wanted


def estimate(wanted: Mapping[Setup, Rounds]) -> tuple[int, float]:
    """Return the number of missing answers and an estimate of the seconds."""
    answers, seconds = 0, START_SECONDS * len(wanted)
    for rounds in wanted.values():
        for (_, concurrency), asked in rounds.items():
            speed = min(TOKENS_PER_SECOND * concurrency, grid.TOKENS_PER_SECOND)
            seconds += sum(item.question.expected_tokens for item in asked) / speed
            answers += len(asked)
    return answers, seconds


def measure(
    args: argparse.Namespace,
    wanted: Mapping[Setup, Rounds],
    files: Files,
    equal: Equal | None,
    logs: Path,
) -> list[str]:
    """Run the rounds and write their lines.

    Returns:
        A sentence per problem that failed.
    """
    failures: list[str] = []
    ignored: list[Line] = []
    client = client_of(args, equal)
    for setup, rounds in wanted.items():
        with serving(setup, args, logs) as url:
            firsts = {policy: asked[0] for (policy, _), asked in rounds.items()}
            for first in firsts.values():
                asyncio.run(client.ask_all(url, [first], ignored.append))
            for (policy, concurrency), asked in rounds.items():
                several = replace(client, concurrency=concurrency)
                lines: list[Line] = []
                before = count_events(url, setup)
                began = time.perf_counter()
                failures += asyncio.run(several.ask_all(url, asked, lines.append))
                seconds = round(time.perf_counter() - began, 4)
                after = count_events(url, setup)
                events = None
                if before is not None and after is not None:
                    events = round(after - before)
                facts = {"round_s": seconds, "round_events": events}
                with files[concurrency].open("a", encoding="utf-8") as file:
                    for line in lines:
                        file.write(json.dumps(line | facts) + "\n")
                speed = sum(line["output_tokens"] for line in lines) / seconds
                log(
                    f"{policy} x {concurrency}: {len(lines)} answers, {speed:.0f}/s, "
                    f"{events or 0} events"
                )
    return failures


def speeds_of(lines: Sequence[Line], concurrency: int) -> list[dict[str, Any]]:
    """Return tokens per second by policy, budget and interval; see `speed_of`."""
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        place = (line["policy"], line["budget"], line["interval"])
        groups.setdefault(place, []).append(line)
    return [
        dict(zip(("policy", "budget", "interval"), place, strict=True))
        | {"concurrency": concurrency}
        | speed_of(members)
        for place, members in groups.items()
    ]


def speed_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Return output tokens, seconds, their ratio, and the server's events.

    Rounds differ in their seconds; `events` is None without a policy.
    """
    tokens = sum(line["output_tokens"] for line in lines)
    rounds = {(line["round_s"], line["round_events"]) for line in lines}
    seconds = sum(seconds for seconds, _ in rounds)
    events = [count for _, count in rounds if count is not None]
    return {
        "output_tokens": tokens,
        "seconds": round(seconds, 2),
        "tok_s": round(tokens / seconds, 1),
        "events": sum(events) if events else None,
    }
