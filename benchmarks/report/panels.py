"""Provides grids of panels, titles, captions and files for the report's figures."""

import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvpolicy.commands.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
MAX_COLOURS = 40  # of a picture: drawings need few, and files are a third as large
# Inches: a letter of a caption, a line of it, the title, margins, an entry of a legend.
LETTER, LINE, TITLE, GAP, ENTRY = 0.078, 0.215, 0.4, 0.1, 1.7
AXIS = 0.3  # inches, below the last row of panels
TEXT = "#444444"
STRIPE = "#f2f2f2"
SHARES = -4, 104  # ends of an axis in per cent, so that marks at 0 and 100 are whole


def grid(
    titles: Sequence[str],
    columns: int,
    size: tuple[float, float],
    x_label: str,
    y_label: str = "",
) -> tuple["Figure", list[Any]]:
    """Return a figure and a panel per title, row by row.

    Args:
        titles: titles of the panels, which share their axes.
        size: width and height of a panel, inches.
        x_label: stands at the lowest panel of each column.
        y_label: stands at the first panel of each row.

    Raises:
        ValueError: matplotlib is not installed.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    width, height = columns * size[0], rows * size[1] + AXIS
    figure, panels = new_figure(rows, height, columns, width)
    for panel in panels[len(titles) :]:
        panel.remove()
    for index, (panel, title) in enumerate(zip(panels, titles, strict=False)):
        panel.set_title(title, fontsize="medium", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        is_lowest = index + columns >= len(titles)
        panel.tick_params(labelbottom=is_lowest)
        panel.set_xlabel(x_label if is_lowest else "")
        panel.set_ylabel("" if index % columns else y_label)
    return figure, list(panels[: len(titles)])


def name_rows(panel: Any, names: Sequence[str]) -> None:
    """Make a panel's y axis a list of names, the first at the top."""
    for place in range(1, len(names), 2):
        panel.axhspan(place - 0.5, place + 0.5, color=STRIPE, zorder=0)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)


def log_ticks(panel: Any) -> None:
    """Make a panel's x axis logarithmic, with numbers in plain or in k and M."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.xaxis.set_minor_formatter(NullFormatter())


def explain(
    figure: "Figure", title: str, caption: str, groups: Sequence[Sequence[Any]] = ()
) -> None:
    """Add a title, a caption and a legend above the panels.

    Args:
        figure: a figure with panels; its height grows.
        groups: groups of legend entries, see `handle`. Several groups stand side by
            side; a single one is spread over as many columns as fit.
    """
    width, panels_height = figure.get_size_inches()
    lines = textwrap.wrap(caption, int(width / LETTER), break_on_hyphens=False)
    if len(groups) == 1:
        columns = max(1, min(len(groups[0]), int(width / ENTRY)))
        entries, rows = list(groups[0]), -(-len(groups[0]) // columns)
    else:
        columns, rows = len(groups), max(map(len, groups), default=0)
        entries = [entry for group in groups for entry in _filled(group, rows)]
    under = TITLE + LINE * len(lines)
    height = panels_height + under + LINE * rows + GAP
    figure.set_size_inches(width, height)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, panels_height / height))
    left, top = GAP / width, 1 - GAP / height
    figure.text(left, top, title, fontsize="x-large", va="top")
    text = "\n".join(lines)
    figure.text(left, 1 - TITLE / height, text, va="top", color=TEXT)
    if entries:
        figure.legend(
            handles=entries,
            loc="upper left",
            bbox_to_anchor=(0, 1 - under / height),
            ncols=columns,
            frameon=False,
            labelspacing=0.3,
        )


def handle(name: str, **options: Any) -> Any:
    """Return an entry of a legend; `options` are those of matplotlib's lines."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=name, **options)


def _filled(group: Sequence[Any], count: int) -> list[Any]:
    """Return a group padded with empty entries."""
    return [*group, *(handle("", linestyle="") for _ in range(count - len(group)))]


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as a small PNG."""
    from PIL import Image  # matplotlib needs it, too

    image = BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    with Image.open(image) as picture:
        few = picture.convert("RGB").quantize(
            MAX_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
        )
        few.save(path, optimize=True)
