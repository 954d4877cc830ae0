"""Groups the rows of a summary into lines and gives each a style."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.servers import FULL
from benchmarks.report.panels import handle

Row = Mapping[str, Any]

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vP"
GREY = "#c4c4c4"
CONTROL = "random"


@dataclass(frozen=True)
class Style:
    """The style of a line; the fields are matplotlib's."""

    color: str = GREY
    marker: str = ""
    linestyle: str = "-"

    @property
    def is_shown(self) -> bool:
        """Whether the line has a colour of its own."""
        return self.color != GREY

    @property
    def options(self) -> dict[str, Any]:
        """Options for matplotlib; grey lines are thin and lie below the others."""
        width, order = (1.6, 3) if self.is_shown else (0.8, 2)
        return vars(self) | {"linewidth": width, "zorder": order, "markersize": 5}


def families_of(rows: Sequence[Row]) -> list[str]:
    """Return the families, the pooled one first; it is left out beside a single one."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    others = [family for family in families if family != POOLED]
    has_pooled = POOLED in families and len(others) > 1
    return [POOLED, *others] if has_pooled else others


def titles_of(families: Sequence[str]) -> list[str]:
    """Return the titles of the families' panels."""
    return ["all families" if family == POOLED else family for family in families]


def budgets_of(rows: Sequence[Row]) -> list[int]:
    """Return the budgets, ascending."""
    return sorted({row["budget"] for row in rows} - {None})


def lines_of(rows: Sequence[Row], family: str) -> dict[str, list[Row]]:
    """Return the rows of a family by line, by ascending budget, FULL first."""
    intervals = len({row.get("interval") for row in rows} - {None})
    lines: dict[str, list[Row]] = {}
    ordered = sorted(rows, key=lambda r: (r["policy"] != FULL, r["budget"] or 0))
    for row in ordered:
        if row["family"] == family:
            lines.setdefault(_name(row, intervals), []).append(row)
    return lines


def _name(row: Row, intervals: int) -> str:
    """Return the name of a line: its policy, and its interval if there are several."""
    interval = row.get("interval")
    if interval is None or intervals < 2:
        return row["policy"]
    return f"{row['policy']}, every {interval}"


def ranked(rows: Sequence[Row]) -> list[str]:
    """Return the lines except FULL by falling mean over budgets and families."""
    shares: dict[str, list[float]] = {}
    for family in families_of(rows):
        for name, members in lines_of(rows, family).items():
            if name != FULL and family != POOLED:
                shares.setdefault(name, []).extend(r["accuracy"] for r in members)
    means = {name: sum(values) / len(values) for name, values in shares.items()}
    return sorted(means, key=lambda name: (-means[name], name))


def styles_of(rows: Sequence[Row]) -> dict[str, Style]:
    """Return the style of each line, FULL first, then the best."""
    styles: dict[str, Style] = {}
    if any(row["policy"] == FULL for row in rows):
        styles[FULL] = Style("black", "x", "--")
    colours = iter(zip(COLOURS, MARKERS, strict=True))
    for name in ranked(rows):
        if name.partition(",")[0] == CONTROL:
            styles[name] = Style("black", ".", ":")
        else:
            styles[name] = Style(*next(colours, (GREY, "")))
    return styles


def legend_of(rows: Sequence[Row]) -> list[Any]:
    """Return a legend's entries for the lines in colour."""
    styles = styles_of(rows).items()
    return [handle(name, **style.options) for name, style in styles if style.is_shown]


def note_on_grey(rows: Sequence[Row], stem: str) -> str:
    """Return the caption's sentence about grey lines, empty without any.

    Args:
        stem: first word of the name of the figure that names all policies.
    """
    grey = sum(not style.is_shown for style in styles_of(rows).values())
    if not grey:
        return ""
    return (
        f"In colour: the {len(COLOURS)} policies with the highest mean; grey: the "
        f"other {grey}, which {stem}-by-policy names."
    )
