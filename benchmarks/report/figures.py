"""Owns the figures of accuracy runs and of traces, drawn with matplotlib.

Called by the command. Policies keep their colours in all figures of a run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.servers import FULL
from benchmarks.accuracy.summary import POOLED
from benchmarks.report.traces import IOU_BY_LAYER
from vllm_kvpolicy.diagnostics import REGIONS
from vllm_kvpolicy.figures import new_figure, retention_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_HEIGHT = 3.4  # inches
NGRAM = "8"
MARKERS = "osD^vP*X"
COST_LABELS = {
    "kv_read": "KV tokens read in decoding, per KV head and question",
    "kv_peak": "most KV tokens held at once, per KV head and question",
}

Row = Mapping[str, Any]
Named = Iterator[tuple[str, "Figure"]]


def draw_accuracy(record: Row) -> Named:
    """Yield the figures of an accuracy run with the names of their files.

    `accuracy-by-budget`, `accuracy-by-kv_read`, `accuracy-by-kv_peak` (with votes of
    several samples where there are any), and `repetition-by-budget`. A panel is a
    family; what an older file does not hold is not drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    rows = record["summary"]
    yield "accuracy-by-budget", by_budget(rows, _share, "answers right, %", True)
    if all(row.get("kv_read") is not None for row in rows):
        for cost in COST_LABELS:
            yield f"accuracy-by-{cost}", by_cost(rows, record.get("votes", []), cost)
    if any(row.get("repeated") for row in rows):
        label = f"repeated {NGRAM}-grams, %"
        yield "repetition-by-budget", by_budget(rows, _repetition, label, False)


def _share(row: Row) -> float | None:
    return 100 * row["accuracy"]


def _repetition(row: Row) -> float | None:
    return 100 * row["repeated"][NGRAM] if row.get("repeated") else None


def by_budget(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    label: str,
    has_interval: bool,
) -> "Figure":
    """Draw a value over the budget, a panel per family and a line per policy.

    Args:
        rows: of a summary.
        value: what is drawn of a row, in per cent; None for nothing.
        label: of the axis.
        has_interval: whether 95 % intervals of the share right are drawn, too.
    """
    families, styles = _families(rows), _styles(rows)
    figure, panels = new_figure(len(families), PANEL_HEIGHT * len(families) + 1)
    for family, panel in zip(families, panels, strict=True):
        panel.set_title(family, fontsize="small", loc="left")
        panel.set_ylabel(label)
        for name, members in _lines(rows, family).items():
            points = [(r["budget"], value(r), r) for r in members]
            drawn = [point for point in points if point[1] is not None]
            if not drawn:
                continue
            budgets, values, kept = zip(*drawn, strict=True)
            colour, marker = styles[name]
            if budgets[0] is None:
                panel.axhline(values[0], color="black", linestyle="--", label=name)
                if has_interval:
                    band = 100 * kept[0]["low"], 100 * kept[0]["high"]
                    panel.axhspan(*band, color="black", alpha=0.08)
                continue
            errors = None
            if has_interval:
                pairs = zip(values, kept, strict=True)
                ends = [(v - 100 * r["low"], 100 * r["high"] - v) for v, r in pairs]
                errors = list(zip(*ends, strict=True))
            panel.errorbar(
                budgets,
                values,
                errors,
                color=colour,
                marker=marker,
                capsize=2,
                elinewidth=0.6,
                label=name,
            )
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("budget, tokens per KV head")
    _legend(figure, panels)
    return figure


def by_cost(rows: Sequence[Row], votes: Sequence[Row], cost: str) -> "Figure":
    """Draw accuracy over a cost, a panel per family and a line per policy.

    Args:
        rows: of a summary.
        votes: majority votes; of each line those that nothing cheaper equals, as
            hollow marks that say length x width and budget.
        cost: a key of COST_LABELS.
    """
    families, styles = _families(rows), _styles(rows)
    figure, panels = new_figure(len(families), PANEL_HEIGHT * len(families) + 1)
    for family, panel in zip(families, panels, strict=True):
        panel.set_title(family, fontsize="small", loc="left")
        panel.set_ylabel("answers right, %")
        for name, members in _lines(rows, family).items():
            colour, marker = styles[name]
            costs = [row[cost] for row in members]
            shares = [100 * row["accuracy"] for row in members]
            panel.plot(costs, shares, color=colour, marker=marker, label=name)
            best = front(_lines(votes, family).get(name, ()), cost)
            for row in best:
                point = row[cost], 100 * row["accuracy"]
                panel.plot(*point, color=colour, marker=marker, fillstyle="none")
                text = f"{row['length']}x{row['width']} {row['budget'] or ''}"
                panel.annotate(text, point, fontsize="xx-small", color=colour)
        panel.set_xscale("symlog")
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel(COST_LABELS[cost])
    _legend(figure, panels)
    return figure


def front(votes: Sequence[Row], cost: str) -> list[Row]:
    """Return the votes that are right more often than all that cost no more."""
    best, kept = 0.0, []
    for row in sorted(votes, key=lambda row: (row[cost], -row["accuracy"])):
        if row["accuracy"] > best:
            best = row["accuracy"]
            kept.append(row)
    return kept


def draw_traces(policies: Mapping[str, Row]) -> Named:
    """Yield the figures of traces: `retention`, `wipe-outs`, `iou-by-layer`.

    Args:
        policies: by name, what `traces.read_policies` gives.

    Raises:
        ValueError: matplotlib is not installed.
    """
    kept = {name: values["retention"] for name, values in policies.items()}
    yield "retention", retention_curves(kept)
    yield "wipe-outs", wipe_outs(policies)
    layers = {
        name: values[IOU_BY_LAYER]
        for name, values in policies.items()
        if IOU_BY_LAYER in values
    }
    if layers:
        yield "iou-by-layer", iou_figure(layers)


def wipe_outs(policies: Mapping[str, Row]) -> "Figure":
    """Draw the share of regions of which an event keeps almost nothing."""
    shares = sorted({percent for _, percent in REGIONS})
    sizes = sorted({size for size, _ in REGIONS})
    figure, panels = new_figure(len(shares), PANEL_HEIGHT * len(shares) + 1)
    styles = _styles([{"policy": name} for name in policies])
    for percent, panel in zip(shares, panels, strict=True):
        panel.set_title(f"at most {percent} % kept", fontsize="small", loc="left")
        panel.set_ylabel("regions wiped out, %")
        for name, values in policies.items():
            found = [(s, values.get(f"wiped_{s}_{percent}")) for s in sizes]
            drawn = [(size, 100 * rate) for size, rate in found if rate is not None]
            colour, marker = styles[name]
            if drawn:
                columns = zip(*drawn, strict=True)
                panel.plot(*columns, color=colour, marker=marker, label=name)
        panel.set_xticks(sizes)
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("size of a region, held tokens")
    _legend(figure, panels)
    return figure


def iou_figure(layers: Mapping[str, Sequence[float]]) -> "Figure":
    """Draw by layer how much two consecutive events share of what they keep."""
    figure, panels = new_figure(1, 4.5)
    styles = _styles([{"policy": name} for name in layers])
    for name, values in layers.items():
        colour, marker = styles[name]
        panels[0].plot(values, color=colour, marker=marker, label=name)
    panels[0].set_xlabel("layer")
    panels[0].set_ylabel("IoU of consecutive events, mean over heads")
    panels[0].xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylim(0, 1.02)
    _legend(figure, panels)
    return figure


def _families(rows: Sequence[Row]) -> list[str]:
    """Return the families, all together first; a single one alone."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    others = [family for family in families if family != POOLED]
    return [POOLED, *others] if len(others) > 1 else others


def _name(row: Row, intervals: int) -> str:
    """Return what a line is called: its policy, and its interval among several."""
    interval = row.get("interval")
    if interval is None or intervals < 2:
        return row["policy"]
    return f"{row['policy']}, every {interval}"


def _lines(rows: Sequence[Row], family: str) -> dict[str, list[Row]]:
    """Return the rows of a family by line, by ascending budget, FULL first."""
    intervals = len({row.get("interval") for row in rows} - {None})
    lines: dict[str, list[Row]] = {}
    ordered = sorted(rows, key=lambda r: (r["policy"] != FULL, r["budget"] or 0))
    for row in ordered:
        if row["family"] == family:
            lines.setdefault(_name(row, intervals), []).append(row)
    return lines


def _styles(rows: Sequence[Row]) -> dict[str, tuple[Any, str]]:
    """Return colour and mark of each line: FULL black, the others by name."""
    intervals = len({row.get("interval") for row in rows} - {None})
    names = sorted({_name(row, intervals) for row in rows})
    styles: dict[str, tuple[Any, str]] = {}
    for index, name in enumerate(name for name in names if name != FULL):
        styles[name] = f"C{index % 10}", MARKERS[index // 10 % len(MARKERS)]
    return styles | {FULL: ("black", "x")}


def _legend(figure: "Figure", panels: Sequence[Any]) -> None:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, fontsize="small"
    )
