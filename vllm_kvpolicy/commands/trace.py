"""`trace`: draws what the events of a trace kept, as PNGs and one page, or a table."""

import argparse
import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvpolicy.commands import figures, trace_summary
from vllm_kvpolicy.commands.outputs import new_folder
from vllm_kvpolicy.commands.trace_summary import summarise, table
from vllm_kvpolicy.observe.trace_files import EventRecord, read_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        count: number of these events.
    """

    events: list[EventRecord] = field(default_factory=list)
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def add(self, event: EventRecord) -> None:
        """Add an event to the sums."""
        chosen = (event.selected >= 0).sum(-1)
        values = {"head_budget": chosen, **event.notes}
        for name, _, _ in HEAD_MAPS:
            if name in values:
                self.sums[name] = self.sums.get(name, 0.0) + values[name]
        self.count += 1


def read_policies(trace: Path, request: str | None = None) -> dict[str, PolicyEvents]:
    """Return the events to draw, by policy.

    Args:
        trace: folder that workers recorded.
        request: id of the request to draw; by default the one of each policy with the
            most events.

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
        policies: events to draw, by policy.
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
    """Write the figures of a trace.

    Args:
        trace: folder that workers recorded.
        output: folder for the figures; made if missing.
        request: see `read_policies`.
        layers: see `draw`.

    Returns:
        Names of the figures.

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
        table=html.escape(table(summaries)),
        figures="".join(parts),
    )
    (output / "index.html").write_text(page, encoding="utf-8")
    return [name for name, _ in drawn]


def add_command(commands: Any) -> None:
    """Add the subcommand `plot`.

    Args:
        commands: the subparsers of `vllm-kvpolicy trace`.
    """
    parser = commands.add_parser(
        "plot",
        help="draw figures",
        description="Draw what the events of a trace kept, as PNG files and one "
        "HTML page.",
    )
    add = parser.add_argument
    add("trace", type=Path, help="trace folder that a server wrote")
    add(
        "--output",
        type=new_folder,
        help="folder for the figures (default: TRACE/plots)",
    )
    add("--request", help="request to draw (default: the longest of each policy)")
    add(
        "--layers",
        type=int,
        nargs="+",
        help=f"layers to draw per head (default: up to {MAX_LAYERS}, evenly spaced)",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Write the figures and print where the page is."""
    output = given.output or given.trace / "plots"
    try:
        names = plot(given.trace, output, given.request, given.layers)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--output: cannot write {str(output)!r}: {error.strerror}")
    print(f"wrote {output / 'index.html'} and {len(names)} figures next to it")


def main(arguments: Sequence[str]) -> None:
    """Run one subcommand."""
    parser = argparse.ArgumentParser(
        prog="vllm-kvpolicy trace",
        description="Show what the events of a trace kept.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    trace_summary.add_command(commands)
    add_command(commands)
    given = parser.parse_args(arguments)
    given.run(given)
