"""Draws majority votes over KV tokens: length x width x ratio."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.accuracy.summary import LENGTHS
from benchmarks.report.cost_figures import COSTS
from benchmarks.report.lines import (
    Row,
    Style,
    budgets_of,
    families_of,
    lines_of,
    titles_of,
)
from benchmarks.report.panels import SHARES, explain, grid, handle, log_ticks
from reasoner.intervals import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILLS = dict(zip(LENGTHS, ("none", "bottom", "full"), strict=True))
DOTS = {"marker": ".", "markersize": 3, "linestyle": "", "alpha": 0.3}
SHAPES = "os^Dv"
"""Of the marks of votes, by budget from the smallest; later ones share the last."""


def by_votes(
    votes: Sequence[Row], styles: Mapping[str, Style], cost: str, setting: str
) -> "Figure":
    """Draw accuracy of majority votes over their cost: length x width x ratio.

    For each policy, votes that no cheaper vote equals are marked and joined; the others
    are dots. Colour is the policy, shape the budget, fill the length, size the width.

    Args:
        votes: votes of a summary.
        styles: styles of the lines of that summary.
        cost: a key of COSTS.
        setting: first sentence of the caption.
    """
    families, budgets = families_of(votes), budgets_of(votes)
    widths = sorted({row["width"] for row in votes})
    title, unit = COSTS[cost]
    figure, panels = grid(
        titles_of(families), 3, (3.6, 3.0), f"{unit}, all samples", "right, %"
    )
    for family, panel in zip(families, panels, strict=True):
        for name, members in lines_of(votes, family).items():
            color = styles[name].color
            best = front(members, cost)
            for rows, style in ((members, DOTS), (best, {"linewidth": 0.8})):
                points = [(row[cost], 100 * row["accuracy"]) for row in rows]
                panel.plot(*zip(*points, strict=True), color=color, **style)
            for row in best:
                panel.plot(
                    row[cost],
                    100 * row["accuracy"],
                    color=color,
                    marker=_shape(row["budget"], budgets),
                    fillstyle=FILLS[row["share"]],
                    markersize=_size(row["width"], widths),
                    label=name,
                )
        log_ticks(panel)
    panels[0].set_ylim(SHARES)
    caption = (
        f"{setting} A point is one choice of length (answers longer than this share of "
        "the family's longest one do not vote), width (samples that vote) and ratio "
        "(policy and budget, tokens per KV head; crosses: full KV cache). Marks and "
        "lines: of each policy the choices that nothing cheaper equals; dots: the "
        "others. Costs are means over questions, per KV head, summed over samples. "
        f"{_note_on_size(votes)}"
    )
    name = f"Majority votes by {title}: length x width x ratio"
    explain(figure, name, caption, _legend_of_votes(votes, styles, widths))
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
    votes: Sequence[Row], styles: Mapping[str, Style], widths: Sequence[int]
) -> list[list]:
    """Return a column of legend entries per property of a mark."""
    budgets = budgets_of(votes)
    grey = {"color": "dimgrey", "linestyle": "", "marker": "o"}
    return [
        [handle(name, color=style.color) for name, style in styles.items()],
        [
            handle(f"budget {b}", **grey | {"marker": _shape(b, budgets)})
            for b in budgets
        ],
        [handle(f"length {x:g}", fillstyle=fill, **grey) for x, fill in FILLS.items()],
        [handle(f"width {w}", markersize=_size(w, widths), **grey) for w in widths],
    ]


def _shape(budget: int | None, budgets: Sequence[int]) -> str:
    if budget is None:
        return "X"
    return SHAPES[min(budgets.index(budget), len(SHAPES) - 1)]


def _size(width: int, widths: Sequence[int]) -> float:
    return 4 + 2 * widths.index(width)


def front(votes: Sequence[Row], cost: str) -> list[Row]:
    """Return the votes that are right more often than all that cost no more."""
    best, kept = 0.0, []
    for row in sorted(votes, key=lambda row: (row[cost], -row["accuracy"])):
        if row["accuracy"] > best:
            best = row["accuracy"]
            kept.append(row)
    return kept
