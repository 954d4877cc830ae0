"""Reads the generated tables of a page, made again from their result files."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import tables
from benchmarks.report.records import ANSWER

SHOWN_BELOW = 0.05
"""A difference is shown if p is below this, corrected by Holm over its table."""
COMPARISONS = "comparisons"


@dataclass(frozen=True)
class Table:
    """A generated table.

    Attributes:
        kind: one of `tables.KINDS`.
        header: headings of the columns.
        rows: cells, without backquotes.
    """

    kind: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Page:
    """A page of the docs.

    Attributes:
        text: Markdown.
        folder: folder of result files.
    """

    text: str
    folder: Path

    def tables_of(self, line: int, name: str) -> list[Table]:
        """Return the tables of a file: those below a line, then upwards."""
        below, above = [], []
        for found in tables.BLOCK.finditer(self.text):
            wanted = yaml.safe_load(found[3])
            if name in wanted.get("files", [wanted.get("file")]):
                header, *rows = tables.KINDS[found[2]](wanted, self.folder)
                cells = [[cell.replace("`", "") for cell in row] for row in rows]
                at = self.text.count("\n", 0, found.start()) + 1
                side = below if at > line else above
                side.append(Table(found[2], list(header), cells))
        return below + above[::-1]

    def cells(self, line: int, name: str, steps: list[str]) -> list[str]:
        """Return cells of the first table that has them.

        Args:
            line: of the page, see `tables_of`.
            name: of a file.
            steps: first cells of a row, and the beginning of a heading.

        Raises:
            ValueError: no table has them.
        """
        *first, heading = steps
        for table in self.tables_of(line, name):
            columns = [
                place
                for place, column in enumerate(table.header)
                if place >= len(first) and column.startswith(heading)
            ]
            rows = [row for row in table.rows if row[: len(first)] == first]
            if rows and columns:
                return [row[columns[0]] for row in rows]
        raise ValueError(f"no table of the page has {' | '.join(steps)}")

    def tests(
        self, line: int, name: str, wanted: Mapping[str, str | None]
    ) -> list[dict[str, Any]]:
        """Return paired tests of the first table of comparisons that has any.

        Args:
            line: of the page, see `tables_of`.
            name: of a file.
            wanted: `score`; `policies`, patterns; `other`, a pattern, or `base` for
                any; `budget`. All but the first may be None.

        Returns:
            `place`, `p`, `is_shown` and `side` of each.

        Raises:
            ValueError: no table has any.
        """
        other, score = wanted["other"] or "base", str(wanted["score"])
        for table in self.tables_of(line, name):
            keys = [column.partition(":")[0] for column in table.header]
            if table.kind != COMPARISONS or score not in keys:
                continue
            found = [
                {
                    "place": f"{row[0]}@{row[2]}",
                    **_tested(row[keys.index(score)], score),
                }
                for row in table.rows
                if _is_any(row[0], wanted["policies"] or "*")
                and (other == "base" or _is_any(row[1], other))
                and wanted["budget"] in (None, row[2])
            ]
            if found:
                return found
        raise ValueError(f"no table of the page compares {score} of these policies")


def _is_any(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("/"))


def _tested(cell: str, score: str) -> dict[str, Any]:
    """Return p of a cell, whether that is shown, and on which side."""
    text, _, p = cell.rpartition(", ")
    if score == ANSWER:
        ours, theirs = map(int, text.split(", "))
        is_gain = ours > theirs
    else:
        is_gain = text.startswith("+")
    side = "gains" if is_gain else "losses"
    return {"p": p, "is_shown": float(p) < SHOWN_BELOW, "side": side}
