"""`trace report`: measures what the events of a trace kept, per policy."""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvpolicy.commands.outputs import new_file
from vllm_kvpolicy.observe.measures import (
    kept_by_bin,
    kept_mask,
    longest_run,
    mask_of,
    memory_time,
    overlap,
    superblocks,
    wiped_regions,
)
from vllm_kvpolicy.observe.trace_files import EventRecord, read_trace

REGIONS = tuple(product((16, 32, 64), (0, 5)))  # tokens, most % kept if wiped out
BINS = 20
HEAD_NOTES = ("retained_mass", "lse_drop", "density_60", "density_90")
Sums = tuple[Any, Any]  # numerator and denominator, each summed over events

LABELS = {
    "requests": "requests",
    "events": "events",
    "iou": "IoU of the tokens that two consecutive events keep",
    "survival": "share of kept tokens that the next event keeps too",
    **{
        f"wiped_{size}_{percent}": f"share of {size}-token regions wiped out by an "
        f"event, <= {percent} % kept"
        for size, percent in REGIONS
    },
    **{
        f"gone_{size}_{percent}": f"share of {size}-position regions gone, <= "
        f"{percent} % kept"
        for size, percent in REGIONS
    },
    "burst": "longest run of tokens that an event drops from a head",
    "utilisation": "share of kept tokens that were chosen",
    "head_budget": "tokens chosen per head",
    "head_spread": "standard deviation of tokens chosen, over the heads of an event",
    "segments": "segments per head",
    "segment_tokens": "tokens per segment",
    "retained_mass": "attention mass that the chosen tokens retain",
    "lse_drop": "LSE drop per event, nats",
    "request_lse_drop": "LSE drop per request, summed over its events, nats",
    "density_60": "share of tokens that hold 60 % of the attention",
    "density_90": "share of tokens that hold 90 % of the attention",
    "memory_time": "memory-time per request, first to last event, superblock-steps",
    "memory_time_share": "memory-time relative to a full KV cache",
}


def measure(event: EventRecord, previous: EventRecord | None) -> dict[str, Sums]:
    """Measure one event.

    Args:
        event: the event.
        previous: the event before it, None for the first of a request.

    Returns:
        Numerator and denominator of each figure, by name as in `LABELS`; of
        `retention`, one of each per bin.
    """
    kept = kept_mask(event)
    heads = kept.shape[0] * kept.shape[1]
    chosen = (event.selected >= 0).sum(-1)
    in_use = mask_of(event.selected, event.position) & kept
    by_bin, tokens = kept_by_bin(kept, BINS, event.position)
    sums = {
        "utilisation": (in_use.sum(), kept.sum()),
        "head_budget": (chosen.sum(), heads),
        "head_spread": (chosen.std(), 1),
        "retention": (by_bin.sum((0, 1)), tokens * heads),
        **_gaps(event, kept),
        **_notes(event, heads),
    }
    if previous is not None:
        iou, survival = overlap(kept_mask(previous), kept)
        sums["iou"] = iou.sum(), heads
        sums["survival"] = survival.sum(), heads
        sums |= _memory_time(event, previous)
    return sums


def _gaps(event: EventRecord, kept: np.ndarray) -> dict[str, Sums]:
    """Measure dropped regions between sinks and local tokens, and dropped runs.

    Args:
        event: the event.
        kept: [L, H, P] bool.
    """
    masks = (mask_of(event.held, event.position), kept)
    held, keeps = (mask.reshape(-1, event.position) for mask in masks)
    heads = list(zip(held, keeps, strict=True))
    free = slice(event.sinks, event.frontier)
    rows = [keep[free][hold[free]] for hold, keep in heads]
    runs = [longest_run(~keep[hold]) for hold, keep in heads]
    sums: dict[str, Sums] = {"burst": (sum(runs), len(runs))}
    for size, percent in REGIONS:
        wiped = np.array([wiped_regions(row, size, percent) for row in rows])
        sums[f"wiped_{size}_{percent}"] = tuple(wiped.sum(0))
        gone = wiped_regions(keeps[:, free], size, percent)
        sums[f"gone_{size}_{percent}"] = gone
    return sums


def _notes(event: EventRecord, heads: int) -> dict[str, Sums]:
    """Measure what the event's notes record, if it has any."""
    notes = event.notes
    sums: dict[str, Sums] = {
        name: (notes[name].sum(dtype=float), heads)
        for name in HEAD_NOTES
        if name in notes
    }
    if "lse_drop" in notes:
        sums["request_lse_drop"] = sums["lse_drop"][0] / heads, event.ordinal == 0
    if "segments" in notes:
        lengths = np.diff(notes["segments"])
        count = np.count_nonzero(lengths)
        sums["segments"] = count, heads
        sums["segment_tokens"] = lengths.sum(), count
    return sums


def _memory_time(event: EventRecord, previous: EventRecord) -> dict[str, Sums]:
    """Integrate memory from the previous event to this one, leaving out the prompt.

    The time after a request's last event is not in the trace, and what requests hold
    before their first event is the same for all policies.
    """
    span = (max(previous.position, event.prompt), event.position, event.block_size)
    state = ([previous.position], [previous.frontier], [superblocks(previous)])
    total, dense = memory_time(*state, *span), memory_time((), (), (), *span)
    return {
        "memory_time": (total, previous.ordinal == 0),
        "memory_time_share": (total, dense),
    }


def summarise(trace: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy of a trace, by name as in `LABELS`.

    `retention` is a list of 20 shares: of the tokens in each twentieth of the text so
    far, those that are kept. Figures without any record are left out.

    Args:
        trace: folder that workers recorded.

    Raises:
        ValueError: no events, or a file that is not one.
    """
    totals: dict[str, dict[str, Sums]] = defaultdict(dict)
    requests: dict[str, set[str]] = defaultdict(set)
    events: dict[str, int] = defaultdict(int)
    latest: dict[str, EventRecord] = {}
    for event in read_trace(trace):
        previous = latest.get(event.request_id)
        if previous is not None and previous.ordinal + 1 != event.ordinal:
            previous = None
        latest[event.request_id] = event
        requests[event.policy].add(event.request_id)
        events[event.policy] += 1
        of_policy = totals[event.policy]
        for name, (above, below) in measure(event, previous).items():
            old = of_policy.get(name, (0, 0))
            of_policy[name] = old[0] + above, old[1] + below
    return {
        policy: {
            "requests": len(requests[policy]),
            "events": events[policy],
            **{
                name: (above / np.maximum(below, 1)).tolist()
                for name, (above, below) in totals[policy].items()
                if np.any(below)
            },
        }
        for policy in sorted(totals)
    }


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per figure and one column per policy."""
    lines = [["", *summaries]]
    for name, label in LABELS.items():
        values = [summary.get(name) for summary in summaries.values()]
        if any(value is not None for value in values):
            lines.append([label, *map(_cell, values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value}" if isinstance(value, int) else f"{value:.3f}"


def add_command(commands: Any) -> None:
    """Add the subcommand `report`.

    Args:
        commands: the subparsers of `vllm-kvpolicy trace`.
    """
    parser = commands.add_parser(
        "report",
        help="print a table",
        description="Print statistics of what the events of a trace kept, per policy.",
    )
    parser.add_argument("trace", type=Path, help="trace folder that a server wrote")
    told = "also write the numbers to this file"
    parser.add_argument("--json", type=new_file, help=told)
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Print the table and write the JSON file if one is asked for."""
    try:
        summaries = summarise(given.trace)
    except ValueError as error:
        parser.error(str(error))
    print(table(summaries))
    if given.json is not None:
        try:
            given.json.write_text(json.dumps(summaries, indent=2) + "\n")
        except OSError as error:
            parser.error(f"--json: cannot write {str(given.json)!r}: {error.strerror}")
