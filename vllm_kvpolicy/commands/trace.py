"""`vllm-kvpolicy trace`: what the events of a trace kept, as a table or as figures.

A trace, a request or a layer that is not there is a ValueError, as is what cannot be
written, or drawn without matplotlib.
"""

import argparse
import base64
import html
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvpolicy.commands import figures
from vllm_kvpolicy.commands.outputs import new_file, new_folder, table
from vllm_kvpolicy.observe import measures
from vllm_kvpolicy.observe.trace_files import EventRecord, read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- `trace report`: a table ---------------------------------------------------

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
    """Measure one event and, after a request's first, its difference to the previous.

    Returns:
        Numerator and denominator of each figure, by name as in `LABELS`; of
        `retention`, one of each per bin.
    """
    kept = measures.kept_mask(event)
    heads = kept.shape[0] * kept.shape[1]
    chosen = (event.selected >= 0).sum(-1)
    in_use = measures.mask_of(event.selected, event.position) & kept
    by_bin, tokens = measures.kept_by_bin(kept, BINS, event.position)
    sums = {
        "utilisation": (in_use.sum(), kept[..., event.pinned :].sum()),
        "head_budget": (chosen.sum(), heads),
        "head_spread": (chosen.std(), 1),
        "retention": (by_bin.sum((0, 1)), tokens * heads),
        **_gaps(event, kept),
        **_notes(event, heads),
    }
    if previous is not None:
        masks = measures.kept_mask(previous), kept
        behind = (mask[..., event.pinned :] for mask in masks)
        iou, survival = measures.overlap(*behind)
        sums["iou"] = iou.sum(), heads
        sums["survival"] = survival.sum(), heads
        sums |= _memory_time(event, previous)
    return sums


def _gaps(event: EventRecord, kept: np.ndarray) -> dict[str, Sums]:
    """Measure dropped regions between sinks and local tokens, and dropped runs.

    Args:
        kept: [L, H, P] bool.
    """
    masks = (measures.mask_of(event.held, event.position), kept)
    held, keeps = (mask.reshape(-1, event.position) for mask in masks)
    heads = list(zip(held, keeps, strict=True))
    free = slice(event.sinks, event.frontier)
    rows = [keep[free][hold[free]] for hold, keep in heads]
    runs = [measures.longest_run(~keep[hold]) for hold, keep in heads]
    sums: dict[str, Sums] = {"burst": (sum(runs), len(runs))}
    for size, percent in REGIONS:
        wiped = np.array([measures.wiped_regions(row, size, percent) for row in rows])
        sums[f"wiped_{size}_{percent}"] = tuple(wiped.sum(0))
        gone = measures.wiped_regions(keeps[:, free], size, percent)
        sums[f"gone_{size}_{percent}"] = gone
    return sums


def _notes(event: EventRecord, heads: int) -> dict[str, Sums]:
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
    total = measures.memory_time(
        previous.frontier, measures.superblocks(previous), *span
    )
    dense = measures.memory_time(0, 0, *span)
    return {
        "memory_time": (total, previous.ordinal == 0),
        "memory_time_share": (total, dense),
    }


def summarise(trace: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy of a trace, by name as in `LABELS`.

    `retention` is a list of 20 shares: of the tokens in each twentieth of the text so
    far, those that are kept. Figures without any record are left out.

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


def summary_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line per figure and one column per policy."""
    lines = [["", *summaries]]
    for name, label in LABELS.items():
        values = [summary.get(name) for summary in summaries.values()]
        if any(value is not None for value in values):
            lines.append([label, *map(_cell, values)])
    return table(lines, are_numbers=True)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value}" if isinstance(value, int) else f"{value:.3f}"


def _report(given: argparse.Namespace) -> None:
    summaries = summarise(given.trace)
    print(summary_table(summaries))
    if given.json is not None:
        with _errors_name("--json", given.json):
            given.json.write_text(json.dumps(summaries, indent=2) + "\n")


@contextmanager
def _errors_name(option: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the option and its path."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{option}: cannot write {str(path)!r}: {error.strerror}"
        ) from None


# -- `trace plot`: figures and one page ----------------------------------------

MAX_LAYERS = 8  # drawn unless layers are named
DPI = 100
# What is drawn per layer and head: name, title and unit.
HEAD_MAPS = (
    ("head_budget", "Tokens chosen per head", "tokens, mean over events"),
    (
        "retained_mass",
        "Attention mass that the chosen tokens retain",
        "share, mean over events",
    ),
    ("lse_drop", "LSE drop", "nats per event, mean"),
    ("density_90", "Tokens that hold 90 % of the attention", "share of tokens held"),
)
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 1060px; margin: 2em auto; }}
pre {{ overflow-x: auto; }}
img {{ max-width: 100%; }}
</style>
<h1>{title}</h1>
<pre>{table}</pre>
{figures}
"""
FIGURE = """<figure id="{name}">
<img alt="{name}" src="data:image/png;base64,{data}">
<figcaption>{name}.png</figcaption>
</figure>
"""


@dataclass
class PolicyEvents:
    """The events of one policy to draw.

    Args:
        events: of the request asked for, else of the one with the most events; of a
            preempted request, those since the last preemption.
        sums: by name of `HEAD_MAPS`, [L, H], summed over all events of the policy.
    """

    events: list[EventRecord] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def add(self, event: EventRecord) -> None:
        chosen = (event.selected >= 0).sum(-1)
        values = {"head_budget": chosen, **event.notes}
        for name, _, _ in HEAD_MAPS:
            if name in values:
                self.sums[name] = self.sums.get(name, 0.0) + values[name]
        self.count += 1


def read_policies(trace: Path, request: str | None = None) -> dict[str, PolicyEvents]:
    """Return the events to draw, by policy: of a request, or each policy's longest.

    Raises:
        ValueError: no events, a file that is not one, or no such request.
    """
    policies: dict[str, PolicyEvents] = {}
    requests: dict[str, list[EventRecord]] = {}
    for event in read_trace(trace):
        policy = policies.setdefault(event.policy, PolicyEvents())
        policy.add(event)
        events = requests.setdefault(event.request_id, [])
        if event.ordinal == 0:
            events.clear()
        events.append(event)
        is_asked_for = event.request_id == request
        if is_asked_for or request is None and len(events) > len(policy.events):
            policy.events = events
    if request is not None and request not in requests:
        raise ValueError(f"request: got {request!r}, expected one of {list(requests)}")
    return policies


def draw(
    policies: Mapping[str, PolicyEvents],
    retention: Mapping[str, Sequence[float]],
    layers: Sequence[int] | None,
) -> Iterator[tuple[str, "Figure"]]:
    """Yield the names of figures, without ending, and the figures.

    Args:
        retention: shares kept by relative position, by policy.
        layers: layers to draw by head; by default up to MAX_LAYERS, evenly spread.

    Raises:
        ValueError: no such layer, or matplotlib is not installed.
    """
    yield "retention", figures.retention_curves(retention)
    for policy, drawn in policies.items():
        for name, title, unit in HEAD_MAPS:
            if name in drawn.sums:
                mean = drawn.sums[name] / drawn.count
                yield (
                    f"{policy}-{name}",
                    figures.head_map(mean, f"{title}, {policy}", unit),
                )
        if not drawn.events:
            continue
        last = drawn.events[-1]
        where = f"{policy}, request {last.request_id}"
        for layer in _layers(layers, len(last.held)):
            title = f"Tokens kept, {where}"
            map_ = figures.retention_map(drawn.events, layer, title)
            yield f"{policy}-kept-layer{layer}", map_
            if {"mass", "segments"} <= set(last.notes):
                title = f"Segments over mass, {where}, event {last.ordinal}"
                map_ = figures.segment_map(last, layer, title)
                yield f"{policy}-segments-layer{layer}", map_


def _layers(wanted: Sequence[int] | None, count: int) -> list[int]:
    """Return the layers to draw; of 10 layers 0, 1, 3, 4, 5, 6, 8 and 9 by default."""
    if wanted is None:
        spread = np.linspace(0, count - 1, min(count, MAX_LAYERS))
        return spread.round().astype(int).tolist()
    for layer in wanted:
        if not 0 <= layer < count:
            raise ValueError(f"layers: got {layer}, expected 0 to {count - 1}")
    return list(wanted)


def plot(
    trace: Path,
    output: Path,
    request: str | None = None,
    layers: Sequence[int] | None = None,
) -> list[str]:
    """Write the figures of a trace to a folder, made if missing; return their names.

    Raises:
        ValueError: no events, a file that is not one, no such request or layer, or
            matplotlib is not installed; then nothing is written.
    """
    summaries = summarise(trace)
    retention = {policy: values["retention"] for policy, values in summaries.items()}
    drawn = list(draw(read_policies(trace, request), retention, layers))
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, figure in drawn:
        image = BytesIO()
        figure.savefig(image, format="png", dpi=DPI)
        (output / f"{name}.png").write_bytes(image.getvalue())
        data = base64.b64encode(image.getvalue()).decode()
        parts.append(FIGURE.format(name=html.escape(name), data=data))
    page = PAGE.format(
        title=html.escape(f"What events keep: {trace.resolve().name}"),
        table=html.escape(summary_table(summaries)),
        figures="".join(parts),
    )
    (output / "index.html").write_text(page, encoding="utf-8")
    return [name for name, _ in drawn]


def _plot(given: argparse.Namespace) -> None:
    output = given.output or given.trace / "plots"
    with _errors_name("--output", output):
        names = plot(given.trace, output, given.request, given.layers)
    print(f"wrote {output / 'index.html'} and {len(names)} figures next to it")


def main(arguments: Sequence[str]) -> None:
    """Run `trace report` or `trace plot`.

    Raises:
        ValueError: see `summarise` and `plot`; or what was found cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy trace",
        description="Show what the events of a trace kept.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    told = "Print statistics of what the events of a trace kept, per policy."
    report = commands.add_parser("report", help="print a table", description=told)
    told = "Draw what the events of a trace kept, as PNG files and one HTML page."
    plotter = commands.add_parser("plot", help="draw figures", description=told)
    for command, run in ((report, _report), (plotter, _plot)):
        command.add_argument(
            "trace", type=Path, help="trace folder that a server wrote"
        )
        command.set_defaults(run=run)
    told = "also write the numbers to this file"
    report.add_argument("--json", type=new_file, help=told)
    add = plotter.add_argument
    told = "folder for the figures (default: TRACE/plots)"
    add("--output", type=new_folder, help=told)
    add("--request", help="request to draw (default: the longest of each policy)")
    told = f"layers to draw per head (default: up to {MAX_LAYERS}, evenly spaced)"
    add("--layers", type=int, nargs="+", help=told)
    given = parser.parse_args(arguments)
    given.run(given)
