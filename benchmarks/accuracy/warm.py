"""Compares answers whose prompts come from the prefix cache with those without it.

    python -m benchmarks.accuracy.warm --grid benchmarks/grids/standard.yaml \
        --policies snapkv ams-tova expected adakv-snapkv --budgets 192 \
        --out runs/warm.jsonl

Options are those of `benchmarks.accuracy`. Each server runs twice: without prefix
caching, and with it, where every problem is asked once before its answer counts. The
answers go to OUT.cold.jsonl and OUT.warm.jsonl; with the same settings the command
continues where these end. OUT.warm.json says per policy how many answers are the same
text, how many are right, and how many prompt tokens came from the cache. The exit
status is 1 if an answer differs or a problem failed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.accuracy import grid, measured, results
from benchmarks.accuracy.__main__ import (
    client_of,
    folder_of,
    parse_args,
    run,
    settings_of,
)
from benchmarks.accuracy.client import Client
from benchmarks.load import LoadError
from benchmarks.printing import log

STATES = {"cold": "", "warm": " --enable-prefix-caching"}

Line = dict[str, Any]


def ask(
    args: argparse.Namespace, client: Client, state: str, logs: Path
) -> tuple[list[Line], list[Line], list[str]]:
    """Ask what the file of a state lacks.

    Returns:
        The answers; what the server measured, by policy and task; and a sentence per
        failed problem.
    """
    own = argparse.Namespace(**vars(args))
    own.out = args.out.with_suffix(f".{state}.jsonl")
    own.serve_args += STATES[state]
    lines = results.continue_file(own.out, settings_of(own, None))
    done = {results.key_of(line) for line in lines}
    questions = grid.read_questions(own)
    wanted = grid.asked_of(grid.cells_of(own), questions, 1, done, is_given=False)
    _, failures = run(own, client, wanted, lines, logs, is_warm=state == "warm")
    return lines, results.batches_of([own.out]), failures


def compare(
    cold: Sequence[Line], warm: Sequence[Line], batches: Sequence[Line]
) -> list[Line]:
    """Return a row per policy, budget and interval.

    Args:
        batches: `hit_tokens` of the latter.
    """
    plain = {results.key_of(line): line for line in cold}
    pairs = [
        (plain[key], line) for line in warm if (key := results.key_of(line)) in plain
    ]
    rows = []
    for place in dict.fromkeys(results.key_of(line)[:3] for line in warm):
        mine = [pair for pair in pairs if results.key_of(pair[1])[:3] == place]
        hits = [batch for batch in batches if measured.place_of(batch)[:3] == place]
        rows.append(
            {
                **dict(zip(results.KEY_FIELDS, place, strict=False)),
                "problems": len(mine),
                "same_text": sum(a["text"] == b["text"] for a, b in mine),
                "right_cold": sum(a["correct"] for a, _ in mine),
                "right_warm": sum(b["correct"] for _, b in mine),
                "prompt_tokens": sum(b["prompt_tokens"] for _, b in mine),
                "hit_tokens": sum(batch["hit_tokens"] for batch in hits),
                "differing": [
                    f"{a['task']} {a['id']}" for a, b in mine if a["text"] != b["text"]
                ],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the policies of a command line; return 1 if an answer differs."""
    args = parse_args(argv)
    if args.samples > 1 or args.url or args.shard != (1, 1):
        raise ValueError("samples, url, shard: expected none beside warm prompts")
    record: Line = {"provenance": provenance.collect("benchmarks.accuracy.warm")}
    folder, client = folder_of(args), client_of(args)
    found = {state: ask(args, client, state, folder) for state in STATES}
    (cold, _, failed), (warm, batches, more) = found.values()
    record["rows"] = rows = compare(cold, warm, batches)
    args.out.with_suffix(".warm.json").write_text(
        json.dumps(record, indent=1) + "\n", encoding="utf-8"
    )
    for row in rows:
        print(json.dumps(row))
    for failure in (failures := failed + more):
        log(f"failed: {failure}")
    differs = any(row["same_text"] != row["problems"] for row in rows)
    return 1 if failures or differs else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LoadError, ValueError) as error:
        sys.exit(f"benchmarks.accuracy.warm: {error}")
