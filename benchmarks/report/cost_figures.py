"""Draws accuracy over KV tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.lines import (
    Row,
    Style,
    budgets_of,
    families_of,
    lines_of,
    note_on_grey,
    styles_of,
    titles_of,
)
from benchmarks.report.measures import MEASURES, Measure
from benchmarks.report.panels import SHARES, explain, grid, handle, log_ticks
from benchmarks.report.records import ANSWER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COSTS = {
    "kv_read": ("KV tokens read", "KV tokens read in decoding"),
    "kv_peak": ("peak memory", "most KV tokens held at once"),
}
"""Cost -> what a title calls it, and the label of its axis."""


def by_cost(
    rows: Sequence[Row],
    cost: str,
    setting: str,
    styles: Mapping[str, Style] | None = None,
    measure: Measure = MEASURES[ANSWER],
) -> "Figure":
    """Draw accuracy over a cost, a panel per family and a line per policy.

    Args:
        cost: a key of COSTS.
        styles: styles of the file's lines; by default those of `rows`.
    """
    families, budgets = families_of(rows), budgets_of(rows)
    styles = styles_of(rows) if styles is None else styles
    title, unit = COSTS[cost]
    figure, panels = grid(titles_of(families), 4, (2.7, 2.2), unit, measure.label)
    for family, panel in zip(families, panels, strict=True):
        for name, members in lines_of(rows, family).items():
            options = styles[name].options
            costs = [row[cost] for row in members]
            shares = [100 * row["accuracy"] for row in members]
            panel.plot(costs, shares, label=name, **options | {"marker": ""})
            for x, y, row in zip(costs, shares, members, strict=True):
                mark: dict[str, Any] = {"marker": ".", "markersize": 3}
                if styles[name].is_shown:
                    larger = [b for b in budgets if b > (row["budget"] or math.inf)]
                    mark = {"markersize": 3 + 2 * (len(budgets) - len(larger))}
                panel.plot(x, y, **options | mark)
        log_ticks(panel)
    panels[0].set_ylim(SHARES)
    caption = (
        f"{setting} Costs are means over questions, per KV head, from lengths and what "
        f"events dropped. Small to large marks: budget {', '.join(map(str, budgets))}; "
        f"cross: full KV cache. Points: {measure.point}; intervals: "
        f"{measure.stem}-by-policy. {note_on_grey(rows, measure.stem)}"
    )
    legend = [
        handle(name, **styles[name].options)
        for name in styles_of(rows)
        if styles[name].is_shown
    ]
    explain(figure, f"{measure.title} by {title}", caption, [legend])
    return figure
