"""Prints the progress and the tables of a benchmark."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.stats import Ratio


def log(sentence: str) -> None:
    """Print progress to standard error."""
    print(sentence, file=sys.stderr, flush=True)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table with aligned columns."""
    rows = [list(header), *map(list, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows
    )


def report(
    summaries: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, Mapping[str, Ratio]],
    columns: Mapping[str, str],
    failures: Mapping[str, str] | None = None,
) -> str:
    """Return the tables that a comparison of servers prints.

    Args:
        summaries: server -> column -> number, or None.
        ratios: `policy / baseline` -> column -> ratio.
        columns: column of the first table -> how it is printed.
        failures: server that did not start -> why.
    """
    servers = [
        [name, *(cell(row[column], form) for column, form in columns.items())]
        for name, row in summaries.items()
    ]
    compared = [
        [name, *(f"{r.median:.3f} [{r.low:.3f}, {r.high:.3f}]" for r in row.values())]
        for name, row in ratios.items()
    ]
    parts = [
        "Medians over the rounds",
        table(["server", *columns], servers),
        "Paired ratios: median [95 % bootstrap interval of the median]",
        table(["ratio", *next(iter(ratios.values()), ())], compared),
    ]
    if failures:
        parts += ["Servers that did not start", "\n".join(failures.values())]
    return "\n\n".join(parts)


def cell(value: float | None, form: str) -> str:
    """Return a number as it is printed, a dash for None."""
    return "-" if value is None else format(value, form)
