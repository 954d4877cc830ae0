"""Fills the tables of pages from result files and keeps the text around them.

A table stands between two comments. The first names its kind and describes it in YAML;
everything up to the second is replaced::

    <!-- table families
    files: [one.json, two.json]
    rows: [full, keydiff, lagkv*]
    -->
    ...
    <!-- /table -->

Kinds are the keys of KINDS; their functions document the descriptions, and raise
ValueError as `fill` does.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import (
    cost_tables,
    gpu_tables,
    language_tables,
    layout_tables,
    margin_tables,
    model_table,
    peer_tables,
    picked_table,
    policy_tables,
)

BLOCK = re.compile(r"(<!-- table (\S+)\n(.*?)-->\n)(.*?)(<!-- /table -->)", re.DOTALL)

Rows = Sequence[Sequence[str]]
"""Header first."""

KINDS: dict[str, Callable[[Mapping[str, Any], Path], Rows]] = {
    "families": policy_tables.by_family,
    "budgets": policy_tables.by_budget,
    "margins": margin_tables.by_family,
    "columns": cost_tables.by_column,
    "comparisons": policy_tables.comparisons,
    "layouts": layout_tables.by_layout,
    "language-comparisons": language_tables.comparisons,
    "language-means": language_tables.means,
    "gpu": gpu_tables.by_part,
    "gpu-checks": gpu_tables.checks,
    "losses": language_tables.losses,
    "model": model_table.by_size,
    "picked": picked_table.by_row,
    "peer": peer_tables.side_by_side,
    "speeds": peer_tables.speeds,
    "tradeoff": language_tables.tradeoff,
}


def fill(text: str, folder: Path) -> str:
    """Return a document with all tables updated.

    Raises:
        ValueError: an invalid description or file, or a row that no file has.
    """

    def one(found: re.Match) -> str:
        return found[1] + render(found[2], found[3], folder) + found[5]

    return BLOCK.sub(one, text)


def render(kind: str, description: str, folder: Path) -> str:
    """Return one table as Markdown with a line end; see `fill`."""
    if kind not in KINDS:
        raise ValueError(f"table: expected one of {sorted(KINDS)}, got {kind!r}")
    try:
        wanted = yaml.safe_load(description)
    except yaml.YAMLError as error:
        raise ValueError(f"table: cannot read {description!r}: {error}") from None
    if not isinstance(wanted, dict):
        raise ValueError(f"table: expected a mapping, got {wanted!r}")
    header, *rows = KINDS[kind](wanted, folder)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines) + "\n"
