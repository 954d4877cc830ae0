"""Draws what several samples get over KV tokens: length x width x ratio."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.accuracy.margins import front, method_of
from benchmarks.accuracy.servers import split
from benchmarks.accuracy.votes import LENGTHS
from benchmarks.report.cost_figures import COSTS
from benchmarks.report.lines import Row, Style, families_of, lines_of, titles_of
from benchmarks.report.panels import SHARES, explain, grid, handle, log_ticks
from reasoner.intervals import wilson
from vllm_kvpolicy.policies.names import parse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILLS = dict(zip(LENGTHS, ("none", "bottom", "full"), strict=True))
DOTS = {"marker": ".", "markersize": 3, "linestyle": "", "alpha": 0.3}
STEPS = {"linewidth": 0.8, "drawstyle": "steps-post"}
SHAPES = "os^Dv"
"""Of marks, by a method's ratios in order; later ones share the last."""
MEASURES = {
    "accuracy": ("Majority votes", "right, %", "samples that vote"),
    "passed": ("Pass@all", "at least one right, %", "samples, one of which is right"),
}
"""Measure of votes -> what a title, an axis and a caption call it."""


def methods_of(rows: Sequence[Row]) -> list[Row]:
    """Return rows with methods in place of policies, see `margins.method_of`."""
    return [{**row, "policy": method_of(row["policy"])} for row in rows]


def by_votes(
    votes: Sequence[Row],
    styles: Mapping[str, Style],
    cost: str,
    setting: str,
    measure: str = "accuracy",
) -> "Figure":
    """Draw what samples get together over their cost: length x width x ratio.

    For each method, choices that no cheaper one equals are its front: marked and joined
    by steps; the others are dots. Colour is the method, shape the ratio, fill the
    length, size the width.

    Args:
        styles: styles of methods.
        cost: a key of COSTS.
        measure: a key of MEASURES.
    """
    families, ratios = families_of(votes), _ratios(votes)
    widths = sorted({row["width"] for row in votes})
    title, unit = COSTS[cost]
    name, label, answers = MEASURES[measure]
    figure, panels = grid(
        titles_of(families), 3, (3.6, 3.0), f"{unit}, all samples", label
    )
    ranked = [row | {"shape": _shape(row, ratios)} for row in map(dict, votes)]
    for family, panel in zip(families, panels, strict=True):
        for method, members in lines_of(methods_of(ranked), family).items():
            color = styles[method].color
            best = front(members, cost, measure)
            for rows, style in ((members, DOTS), (best, STEPS)):
                points = [(row[cost], 100 * row[measure]) for row in rows]
                panel.plot(*zip(*points, strict=True), color=color, **style)
            for row in best:
                panel.plot(
                    row[cost],
                    100 * row[measure],
                    color=color,
                    marker=row["shape"],
                    fillstyle=FILLS[row["share"]],
                    markersize=_size(row["width"], widths),
                    label=method,
                )
        log_ticks(panel)
    panels[0].set_ylim(SHARES)
    caption = (
        f"{setting} A point is one choice of length (answers longer than this share of "
        f"the family's longest one do not count), width ({answers}) and ratio (budget "
        "in tokens per KV head, or variant; crosses: full KV cache). Marks and steps: "
        "of each method the choices that nothing cheaper equals; dots: the others. "
        "Costs are means over questions, per KV head, summed over samples. "
        f"{_note_on_size(votes)}"
    )
    heading = f"{name} by {title}: length x width x ratio"
    explain(figure, heading, caption, _legend_of_votes(styles, ratios, widths))
    return figure


def _note_on_size(rows: Sequence[Row]) -> str:
    """Return a sentence about the number of questions in the panels."""
    parts = []
    for count in sorted({row["problems"] for row in rows}):
        low, high = (100 * end for end in wilson(count // 2, count))
        parts.append(f"{low:.0f} to {high:.0f} % with {count}")
    sizes = ", ".join(parts)
    return (
        f"Of half the answers right, the 95 % interval (Wilson) is {sizes} questions."
    )


def _legend_of_votes(
    styles: Mapping[str, Style],
    ratios: Mapping[str, Sequence[str]],
    widths: Sequence[int],
) -> list[list]:
    """Return a column of legend entries per property of a mark."""
    by_shape: dict[str, dict[str, None]] = {}
    for names in ratios.values():
        for index, name in enumerate(names):
            by_shape.setdefault(SHAPES[min(index, len(SHAPES) - 1)], {})[name] = None
    grey = {"color": "dimgrey", "linestyle": "", "marker": "o"}
    return [
        [handle(name, color=style.color) for name, style in styles.items()],
        [
            handle(", ".join(sorted(names)), **grey | {"marker": shape})
            for shape, names in by_shape.items()
        ],
        [handle(f"length {x:g}", fillstyle=fill, **grey) for x, fill in FILLS.items()],
        [handle(f"width {w}", markersize=_size(w, widths), **grey) for w in widths],
    ]


def _ratios(votes: Sequence[Row]) -> dict[str, list[str]]:
    """Return the names of each method's ratios, small budgets first."""
    found: dict[str, dict[str, None]] = {}
    for row in sorted(votes, key=lambda row: row["budget"] or 0):
        if row["budget"] is not None:
            found.setdefault(method_of(row["policy"]), {})[_ratio(row)] = None
    return {method: list(names) for method, names in found.items()}


def _ratio(row: Row) -> str:
    """Return what sets the ratio of a row: its variant, its budget, or both."""
    name, variant = split(row["policy"])
    budget = "" if parse(name).is_unbounded else f"budget {row['budget']}"
    return ", ".join(filter(None, (variant, budget))) or "as trained"


def _shape(row: Row, ratios: Mapping[str, Sequence[str]]) -> str:
    if row["budget"] is None:
        return "X"
    place = ratios[method_of(row["policy"])].index(_ratio(row))
    return SHAPES[min(place, len(SHAPES) - 1)]


def _size(width: int, widths: Sequence[int]) -> float:
    return 4 + 2 * widths.index(width)
