"""Draws what policies lose over what they hold, of a pretrained model."""

from collections.abc import Mapping, Sequence
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.accuracy.servers import FULL, split
from benchmarks.report.language_tables import LOSSES, Point, points
from benchmarks.report.lines import COLOURS, GREY, MARKERS
from benchmarks.report.panels import explain, grid, handle
from benchmarks.report.records import read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = {True: "nats above full KV", False: "answers right, %"}


def draw_tradeoff(paths: Sequence[Path], about: str) -> "Figure":
    """Return a panel for each set of texts or problems that records are of.

    Args:
        paths: records of `benchmarks.language`.
        about: model and texts as the caption names them.
    """
    columns = columns_of(paths)
    figure, panels = grid(list(columns), 1, (8.0, 2.6), "KV held, of full KV's")
    styles: dict[str, dict[str, Any]] = {}
    for panel, wanted in zip(panels, columns.values(), strict=True):
        is_loss = wanted["part"] == LOSSES
        scale = 1 if is_loss else 100
        panel.set_ylabel(UNITS[is_loss])
        for name, line in lines_of(wanted).items():
            style = styles.setdefault(name, _style(name, styles))
            x = [point.held for point in line]
            y = [scale * point.mean for point in line]
            ends = [[scale * (point.mean - point.low) for point in line]]
            ends.append([scale * (point.high - point.mean) for point in line])
            panel.errorbar(x, y, ends, capsize=2, **style)
    caption = (
        f"{about} Intervals of 95 % over texts. Dashed: policies nobody trained; a "
        "line joins the budgets and variants of one policy."
    )
    handles = [handle(name, **style) for name, style in styles.items()]
    explain(figure, "What is lost over what is held", caption, [handles])
    return figure


def columns_of(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return by title what `points` takes, and `places` for the place."""
    columns: dict[str, dict[str, Any]] = {}
    for path in paths:
        record = read(path, "items")
        for part, items in record["items"].items():
            kinds = sorted(set(items.values()))
            lengths = {kind.rpartition("-")[2] for kind in kinds}
            sizes = " and ".join(sorted(lengths, key=lambda size: (len(size), size)))
            told = "texts" if part == LOSSES else f"facts of {sizes} tokens"
            column = columns.setdefault(
                told, {"files": [], "part": part, "places": set()}
            )
            column["files"].append(path)
            column["places"] |= {
                (row["budget"], row["interval"])
                for row in record["rows"]
                if row["part"] == part
            }
    return columns


def lines_of(wanted: Mapping[str, Any]) -> dict[str, Sequence[Point]]:
    """Return the points of each policy, its variants and budgets by what they hold."""
    found: dict[str, list[Point]] = {}
    for place in sorted(wanted["places"]):
        about = {"files": wanted["files"], "part": wanted["part"], "place": place}
        for label, point in points(about, Path()).items():
            name, _ = split(label)
            if name != FULL and isfinite(point.held):
                found.setdefault(name, []).append(point)
    by_held = attrgetter("held")
    return {name: sorted(line, key=by_held) for name, line in found.items()}


def _style(name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the next style, dashed for policies without files of their own."""
    place = len(known)
    is_fitted = name.partition("+")[0] in ("wgkv", "dms", "kvzap", "duo")
    return {
        "color": COLOURS[place] if place < len(COLOURS) else GREY,
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": "-" if is_fitted else "--",
        "markersize": 5,
    }
