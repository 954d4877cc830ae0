"""Draws the figures of traces: retention, wipe-outs, IoU by layer, AMS segments."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report.panels import explain, grid, handle, name_rows
from benchmarks.report.traces import BUDGETS, IOU_BY_LAYER, SEGMENTS
from vllm_kvpolicy.commands.figures import new_figure, retention_curves
from vllm_kvpolicy.commands.trace import REGIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Policies = Mapping[str, Row]
KINDS = {"wiped": "of the tokens held", "gone": "of all positions so far"}
SIZES = {16: ("#0072b2", "o"), 32: ("#d55e00", "s"), 64: ("#009e73", "D")}
QUOTA, ALWAYS, OLD = "#56b4e9", "#d0e6f5", "#d55e00"
MAX_NUMBERS = 12  # layers; maps of more show colours only


def draw_traces(policies: Policies, about: str = "") -> Iterator[tuple[str, "Figure"]]:
    """Yield `retention`, `wipe-outs`, `iou-by-layer` and, of AMS, `segments-POLICY`.

    Args:
        about: model and task as captions name them.

    Raises:
        ValueError: traces of models of different depth, or matplotlib is not installed.
    """
    setting = setting_of(policies, about)
    yield "retention", retention(policies, setting)
    yield "wipe-outs", wipe_outs(policies, setting)
    layers = {
        name: values[IOU_BY_LAYER]
        for name, values in policies.items()
        if IOU_BY_LAYER in values
    }
    if layers:
        yield "iou-by-layer", iou_map(layers, setting)
    for name, values in policies.items():
        if SEGMENTS in values:
            yield f"segments-{name}", segments(name, values, about)


def setting_of(policies: Policies, about: str) -> str:
    """Return a sentence about what was recorded."""
    values = policies.values()
    budgets = sorted({budget for each in values for budget in each[BUDGETS]})
    requests = _range([each["requests"] for each in values])
    events = _range([each["events"] for each in values])
    parts = [about] if about else []
    parts.append(f"budget {', '.join(map(str, budgets))} tokens per KV head")
    parts.append(f"per policy {requests} requests with {events} events")
    return f"Setting: {', '.join(parts)}."


def _range(counts: Sequence[int]) -> str:
    few, many = min(counts), max(counts)
    return f"{few:,}" if few == many else f"{few:,} to {many:,}"


def retention(policies: Policies, setting: str) -> "Figure":
    """Draw the share kept by relative position, a panel per policy."""
    shares = {name: values["retention"] for name, values in policies.items()}
    figure = retention_curves(shares, title=None)
    caption = (
        f"{setting} An event at position p sees the tokens 0 to p - 1; the share of "
        "each twentieth of them that is still there after it, mean over heads and "
        "events. Blue: the policy above the panel; grey: the others."
    )
    explain(figure, "Retention by position", caption)
    return figure


def wipe_outs(policies: Policies, setting: str) -> "Figure":
    """Draw the share of regions of which an event keeps almost nothing."""
    percents = sorted({percent for _, percent in REGIONS})
    kinds = [(kind, percent) for kind in KINDS for percent in percents]
    titles = [f"{KINDS[kind]}, <= {percent} % kept" for kind, percent in kinds]
    key = f"wiped_{REGIONS[0][0]}_{percents[-1]}"
    names = sorted(policies, key=lambda name: policies[name].get(key, 0))
    size = 2.9, 0.22 * len(names) + 0.8
    figure, panels = grid(titles, 4, size, "regions wiped out, %")
    for (kind, percent), panel in zip(kinds, panels, strict=True):
        name_rows(panel, names)
        for region, (color, marker) in SIZES.items():
            rates = [policies[name].get(f"{kind}_{region}_{percent}") for name in names]
            found = [(100 * r, place) for place, r in enumerate(rates) if r is not None]
            if found:
                columns = zip(*found, strict=True)
                style = {"color": color, "linestyle": "", "markersize": 5}
                panel.plot(*columns, marker=marker, label=f"{region} tokens", **style)
    panels[0].set_xlim(left=0)
    handles = [
        handle(f"{region} tokens", color=color, marker=marker, linestyle="")
        for region, (color, marker) in SIZES.items()
    ]
    caption = (
        f"{setting} What lies between sinks and newest tokens is cut into regions of "
        "16, 32 or 64 tokens; of one that is wiped out an event keeps at most the "
        "share above the panel. Left: regions of what the head held, in time order; "
        "right: regions of positions, dropped before or not. Mean over heads and "
        "events."
    )
    explain(figure, "Wipe-out rate", caption, [handles])
    return figure


def iou_map(layers: Mapping[str, Sequence[float]], setting: str) -> "Figure":
    """Draw the IoU of consecutive events by policy and layer."""
    depths = sorted({len(values) for values in layers.values()})
    if len(depths) > 1:
        raise ValueError(f"traces: expected those of one model, got {depths} layers")
    names = sorted(layers, key=lambda name: -np.mean(layers[name]))
    values = np.array([layers[name] for name in names])
    width = min(10.0, 0.55 * values.shape[1] + 3.5)
    figure, (panel,) = new_figure(1, 0.25 * len(names) + 1, width=max(6.5, width))
    image = panel.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    if values.shape[1] <= MAX_NUMBERS:
        for (row, column), value in np.ndenumerate(values):
            color = "white" if value < 0.6 else "black"
            style = {"ha": "center", "va": "center", "fontsize": "small"}
            panel.text(column, row, f"{value:.2f}", color=color, **style)
    panel.set_yticks(range(len(names)), names)
    panel.set_xlabel("layer")
    panel.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=panel, label="IoU, mean over heads")
    caption = (
        f"{setting} IoU: tokens that a head keeps at both of two consecutive events of "
        "a request / tokens that it keeps at either. 1: the same tokens; tokens that "
        "came in between count as kept at one. Policies in the order of their means."
    )
    explain(figure, "What consecutive events keep alike, by layer", caption)
    return figure


def segments(policy: str, values: Row, about: str) -> "Figure":
    """Draw segments, mass and quotas of heads at two consecutive events."""
    heads = values[SEGMENTS]
    titles = [
        f"KV head {head['head']}, event {head['ordinal'] + 1} of the request, after "
        f"{head['position']} tokens"
        for head in heads
    ]
    columns = len({head["head"] for head in heads})
    figure, panels = grid(
        titles,
        columns,
        (5.0, 2.6),
        "token held before the event, oldest first",
        "share of the segment kept, %",
    )
    top = max(max(_density(head)) for head in heads)
    bottom = min(min(_density(head)) for head in heads)
    for head, panel in zip(heads, panels, strict=True):
        _draw_head(head, panel, (bottom / 2, 2 * top))
    groups = [
        [
            handle("kept within the quota", color=QUOTA, linewidth=8),
            handle("always kept: sinks, newest tokens", color=ALWAYS, linewidth=8),
        ],
        [
            handle("attention mass per token (right axis)", color="black"),
            handle("left of it: kept by the event before", color=OLD, linestyle=":"),
        ],
    ]
    budgets = ", ".join(map(str, values[BUDGETS]))
    caption = (
        f"Setting: {about + ', ' if about else ''}budget {budgets} tokens per KV head, "
        f"one request, layer {heads[0]['layer']}. What a head holds is cut into "
        "segments of about equal attention mass, oldest first; each gets a quota of "
        "the budget (the number above it), and its tokens with the best scores fill it."
    )
    title = f"Segments and quotas of {policy} at two consecutive events"
    explain(figure, title, caption, groups)
    return figure


def _density(head: Row) -> np.ndarray:
    return np.array(head["mass"]) / np.array(head["tokens"])


def _draw_head(head: Row, panel: Any, limits: tuple[float, float]) -> None:
    """Draw one head at one event; `limits` are those of mass per token."""
    tokens, quota = np.array(head["tokens"]), np.array(head["quota"])
    chosen = np.array(head["chosen"])
    ends = tokens.cumsum()
    starts = ends - tokens
    style = {"width": tokens, "align": "edge", "edgecolor": "white", "linewidth": 1}
    panel.bar(starts, 100 * chosen / tokens, color=ALWAYS, **style)
    within = 100 * np.minimum(quota, chosen) / tokens
    panel.bar(starts, within, color=QUOTA, **style)
    for start, end, number in zip(starts, ends, quota, strict=True):
        panel.text((start + end) / 2, 103, f"{number}", ha="center", fontsize="small")
    if head["old"]:
        panel.axvline(head["old"], color=OLD, linestyle=":")
    panel.set_ylim(0, 115)
    panel.set_yticks((0, 50, 100))
    mass = panel.twinx()
    mass.set(yscale="log", ylim=limits)
    mass.stairs(_density(head), np.append(starts, ends[-1]), color="black")
    mass.spines["top"].set_visible(False)
