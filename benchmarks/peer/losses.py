"""Predicts texts on kvpress behind one compression of what comes before.

    python -m benchmarks.peer losses
    python -m benchmarks.language --grid benchmarks/grids/language/peer.yaml

Both predict the same tokens of the same texts with the same weights. A text ends one
interval behind the first event of the budget, so that there is one event: kvpress
compresses the tokens before it as a prompt, our engine drops tokens of them. Options
are those of benchmarks.language; its summary, record and tables are used, in which rows
of kvpress are named `kvpress:POLICY`. What is kept attends alike in whatever order the
cache has it, so a press has one row here.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks import packed, provenance
from benchmarks.accuracy.results import Line, check_digests, continue_file, key_of
from benchmarks.language import __main__ as language
from benchmarks.language import losses, record
from benchmarks.language.texts import Text
from benchmarks.peer import asking, process
from benchmarks.peer.catalogue import FULL, PRESSES, rows_of
from benchmarks.peer.process import PeerError, Worker
from benchmarks.printing import log

GRID = provenance.ROOT / "benchmarks" / "grids" / "language" / "peer.yaml"
DEFAULTS = ["--grid", str(GRID), "--policies", FULL, *PRESSES]
PART = "losses"
PREFIX = "kvpress:"
"""Of the peer's rows."""


def check(asked: argparse.Namespace) -> None:
    """Raise ValueError if options of benchmarks.language do not fit a peer."""
    rows_of(asked.policies)
    for budget in asked.budgets:
        for interval in asked.intervals:
            length = losses.first_event(budget, interval) + interval + 1
            if asked.text_tokens != length:
                raise ValueError(
                    f"text-tokens: got {asked.text_tokens}, expected {length}, one "
                    f"interval behind the first event at {budget}, {interval}"
                )


def run(args: argparse.Namespace, asked: argparse.Namespace) -> int:
    """Predict what the output file lacks, and write the record.

    Raises:
        PeerError: a press refuses.
    """
    settings, items = language.read(asked)
    texts, path = items[PART], args.folder / f"{PART}.jsonl"
    worker_settings = {
        "model": str(settings.model.resolve()),
        "dtype": settings.dtype,
        "threads": args.threads,
    }
    with Worker(process.command(args.python), worker_settings) as worker:
        options = asking.options_of(asked)
        settled = {
            "model": settings.model.name,
            "dtype": settings.dtype,
            "peer": worker.versions,
            "press_options": options,
        }
        lines = continue_file(path, settled)
        check_digests(lines, {(PART, text.id): text.digest for text in texts})
        done = set(map(key_of, lines))
        wanted = [one for one in wanted_of(asked, texts) if key_of(one[0]) not in done]
        log(f"{path}: {len(wanted)} texts to come")
        with path.open("a", encoding="utf-8") as file:
            for key, text in tqdm(wanted, mininterval=asking.LOG_SECONDS, unit="text"):
                file.write(json.dumps(key | measure(worker, options, key, text)) + "\n")
                file.flush()
    made = record.of_files([path], "benchmarks.peer")
    packed.write_text(args.record, record.compact(made))
    log(f"wrote {args.record}")
    return 0


def wanted_of(
    asked: argparse.Namespace, texts: list[Text]
) -> Iterator[tuple[Line, Text]]:
    """Yield the fields that name each output line, and its text, text by text."""
    policies = dict.fromkeys((FULL, *asked.policies))
    places = product(asked.budgets, asked.intervals, policies)
    for text, (budget, interval, policy) in product(texts, list(places)):
        key = {
            "policy": f"{PREFIX}{policy}",
            "budget": budget,
            "interval": interval,
            "task": PART,
            "id": text.id,
            "sample": 0,
        }
        yield key, text


def measure(
    worker: Worker, options: Mapping[str, Any], key: Line, text: Text
) -> dict[str, Any]:
    """Return the figures of an output line.

    Returns:
        `kind` and `digest` of the text; those of `language.losses.figures`; `kept`:
        tokens that a head keeps; `sinks_held`: share of the first tokens that it keeps,
        None if that is not watched; both means over layers and heads.

    Raises:
        PeerError: the press refuses.
    """
    policy, budget = key["policy"].removeprefix(PREFIX), key["budget"]
    first = losses.first_event(budget, key["interval"])
    reply = worker.ask(
        {
            "row": policy,
            "budget": budget,
            "options": options,
            "token_ids": text.token_ids,
            "at": first,
        }
    )
    if "refused" in reply:
        raise PeerError(f"{policy}: refused at {budget}: {reply['refused']}")
    found = np.pad(reply["losses"], (first, 0), constant_values=np.nan)
    kept = reply["kept_mean"]
    return {
        "kind": text.kind,
        "digest": text.digest,
        **losses.figures(losses.Scored(found), budget, key["interval"]),
        "kept": reply["held"] if kept is None else kept,
        "sinks_held": next(iter(reply["sinks_held"]), None),
    }
