"""Draws the figures of accuracy runs: by policy, by budget, and repetition."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.servers import FULL
from benchmarks.report.cost_figures import COSTS, by_cost
from benchmarks.report.lines import (
    Row,
    budgets_of,
    families_of,
    legend_of,
    lines_of,
    note_on_grey,
    ranked,
    styles_of,
    titles_of,
)
from benchmarks.report.measures import MEASURES, Measure, drawn
from benchmarks.report.panels import SHARES, explain, grid, handle, name_rows
from benchmarks.report.records import ANSWER
from benchmarks.report.vote_figures import by_votes, methods_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NGRAM = "8"
SHIFT = 0.05  # between lines side by side, in steps from one budget to the next
PANEL = 2.7, 2.2  # inches


def draw_accuracy(
    record: Row, about: str = "", score: str = ANSWER
) -> Iterator[tuple[str, "Figure"]]:
    """Yield the figures of an accuracy run with the names of their files.

    Always `accuracy-by-policy` and `accuracy-by-COST`; with several budgets
    `accuracy-by-budget`. For another score its word stands for `accuracy`. Of the
    answer also, if tokens of answers are known, `repetition-by-budget`, and with
    several samples `votes-by-COST` and `passes-by-COST`. Each panel is a family.
    Figures that an older file lacks and costs that are not known are not drawn.

    Args:
        about: model and task as captions name them; by default the model's name.

    Raises:
        ValueError: the file lacks the score, or matplotlib is not installed.
    """
    rows = [drawn(row, score) for row in record["summary"]]
    measure, setting = MEASURES[score], setting_of(record, about)
    yield f"{measure.stem}-by-policy", by_policy(rows, setting, measure)
    if len(budgets_of(rows)) > 1:
        yield f"{measure.stem}-by-budget", by_budget(rows, setting, measure)
        if score == ANSWER and any(row.get("repeated") for row in rows):
            yield "repetition-by-budget", repetition(rows, setting)
    if known := _with_costs(rows):
        for cost in COSTS:
            figure = by_cost(known, cost, setting, styles_of(rows), measure)
            yield f"{measure.stem}-by-{cost}", figure
    if score == ANSWER and (known := _with_costs(record.get("votes") or ())):
        styles = styles_of(methods_of(rows))
        for cost in COSTS:
            yield f"votes-by-{cost}", by_votes(known, styles, cost, setting)
        for cost in COSTS if "passed" in known[0] else ():
            figure = by_votes(known, styles, cost, setting, "passed")
            yield f"passes-by-{cost}", figure


def _with_costs(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose costs are known."""
    return [row for row in rows if row.get("kv_read") is not None]


def setting_of(record: Row, about: str) -> str:
    """Return a sentence about the settings of a record."""
    settings, rows = record["settings"], record["summary"]
    counts = [row["problems"] for row in rows if row["family"] != POOLED]
    few, many = min(counts), max(counts)
    parts = [about or f"model {settings.get('model', 'not on file')}"]
    parts.append(f"{f'{few} to ' * (few < many)}{many} questions per family")
    temperature = settings.get("temperature")
    if temperature is not None:
        parts.append(f"temperature {temperature}" if temperature else "greedy decoding")
    every = {row.get("interval", settings.get("interval")) for row in rows} - {None}
    if len(every) == 1:
        parts.append(f"an event every {every.pop()} tokens")
    return f"Setting: {', '.join(parts)}."


def by_policy(
    rows: Sequence[Row], setting: str, measure: Measure = MEASURES[ANSWER]
) -> "Figure":
    """Draw every policy's accuracy with its interval, a panel per family.

    Args:
        setting: first sentence of the caption.
        measure: what the rows' accuracy is, see `measures.drawn`.
    """
    from matplotlib import colormaps

    families, names, budgets = families_of(rows), ranked(rows), budgets_of(rows)
    # Light to dark with the budget.
    colours = colormaps["viridis_r"](np.linspace(0.25, 1, len(budgets)))
    size = 2.0, 0.24 * len(names) + 0.8
    figure, panels = grid(titles_of(families), 6, size, measure.label)
    for family, panel in zip(families, panels, strict=True):
        name_rows(panel, names)
        for row in rows:
            if row["family"] == family and row["policy"] == FULL:
                _draw_full(panel.axvline, panel.axvspan, 100 * row["accuracy"], row)
        lines = lines_of(rows, family)
        for place, name in enumerate(names):
            for row in lines.get(name, ()):
                index = budgets.index(row["budget"])
                panel.errorbar(
                    100 * row["accuracy"],
                    place + 0.6 * ((index + 0.5) / len(budgets) - 0.5),
                    xerr=_interval([row]),
                    color=colours[index],
                    marker="o",
                    markersize=3.5,
                    elinewidth=1.2,
                    label=name,
                )
        panel.set(xlim=SHARES, xticks=(0, 50, 100))
    legend = [
        handle(f"budget {budget}", color=colour, marker="o")
        for budget, colour in zip(budgets, colours, strict=True)
    ]
    caption = (
        f"{setting} Points: {measure.point}; bars: its 95 % interval "
        f"({measure.interval}). {_note_on_full(rows)}Budgets are tokens per KV head. "
        "Policies stand in the order of their mean over budgets and families."
    )
    explain(figure, f"{measure.title} by policy and family", caption, [legend])
    return figure


def by_budget(
    rows: Sequence[Row], setting: str, measure: Measure = MEASURES[ANSWER]
) -> "Figure":
    """Draw accuracy over the budget, a panel per family and a line per policy."""
    figure, panels = _over_budget(
        rows, lambda row: 100 * row["accuracy"], measure.label, True
    )
    panels[0].set_ylim(SHARES)
    caption = (
        f"{setting} Points: {measure.point}; bars: its 95 % interval "
        f"({measure.interval}). {_note_on_full(rows)}{note_on_grey(rows, measure.stem)}"
    )
    explain(figure, f"{measure.title} by budget", caption, [legend_of(rows)])
    return figure


def repetition(rows: Sequence[Row], setting: str) -> "Figure":
    """Draw the share of repeated n-grams over the budget; see `by_budget`."""

    def share(row: Row) -> float | None:
        return 100 * row["repeated"][NGRAM] if row.get("repeated") else None

    figure, panels = _over_budget(rows, share, "repeated, %", False)
    panels[0].set_ylim(bottom=0)
    caption = (
        f"{setting} Share of the runs of {NGRAM} tokens in an answer that were in it "
        f"before, mean over answers. Dashed: full KV cache. "
        f"{note_on_grey(rows, MEASURES[ANSWER].stem)}"
    )
    title = f"Repetition by budget: repeated {NGRAM}-grams"
    explain(figure, title, caption, [legend_of(rows)])
    return figure


def _over_budget(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    label: str,
    has_interval: bool,
) -> tuple["Figure", list[Any]]:
    """Draw a value over the budget; lines are shifted to keep error bars apart.

    Args:
        value: returns a row's value in per cent, None for no point.
        has_interval: also draw the interval of the share right.
    """
    families, budgets, styles = families_of(rows), budgets_of(rows), styles_of(rows)
    shown = [name for name, style in styles.items() if style.is_shown and name != FULL]
    figure, panels = grid(
        titles_of(families), 4, PANEL, "budget, tokens per KV head", label
    )
    for family, panel in zip(families, panels, strict=True):
        for name, members in lines_of(rows, family).items():
            known = [row for row in members if value(row) is not None]
            values = [value(row) for row in known]
            if name == FULL:
                for share, row in zip(values, known, strict=True):
                    band = panel.axhspan if has_interval else None
                    _draw_full(panel.axhline, band, share, row)
                continue
            is_shown = name in shown
            place = shown.index(name) - (len(shown) - 1) / 2 if is_shown else 0
            panel.errorbar(
                [budgets.index(row["budget"]) + SHIFT * place for row in known],
                values,
                _interval(known) if has_interval and is_shown else None,
                ecolor=(styles[name].color, 0.5),
                elinewidth=0.8,
                label=name,
                **styles[name].options,
            )
        panel.set_xticks(range(len(budgets)), map(str, budgets))
    return figure, panels


def _draw_full(line: Callable, band: Callable | None, share: Any, row: Row) -> None:
    """Draw the full KV cache as a dashed line, its interval as a band if wanted."""
    line(share, color="black", linestyle="--", linewidth=1, label=FULL)
    if band is not None:
        ends = 100 * row["low"], 100 * row["high"]
        band(*ends, color="black", alpha=0.12, linewidth=0)


def _interval(rows: Sequence[Row]) -> np.ndarray:
    """Return how far intervals reach down and up from their shares, [2, n] per cent."""
    share, low, high = (
        np.array([100 * row[key] for row in rows])
        for key in ("accuracy", "low", "high")
    )
    return np.array([share - low, high - share]).clip(0)


def _note_on_full(rows: Sequence[Row]) -> str:
    has_full = any(row["policy"] == FULL for row in rows)
    return "Dashed: full KV cache, its interval shaded. " if has_full else ""
