"""Owns the tables of the docs: filled in from result files, the text around them kept.

Called by the command. A table stands between two comments; the first says in YAML what
is in it, and everything up to the second is written anew::

    <!-- table
    files: [one.json, two.json]     in benchmarks/results; a star after a policy's name
    rows: [full, keydiff, lagkv*]   means the second file
    budget: 128                     default: the only one
    against: base                   optional: paired test against full or base
    -->
    ...
    <!-- /table -->

Columns are the families of the first file, in its order.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.accuracy.servers import FULL
from benchmarks.accuracy.summary import POOLED, bases_of

BLOCK = re.compile(r"(<!-- table\n(.*?)-->\n)(.*?)(<!-- /table -->)", re.DOTALL)
KEYS = {"files", "rows", "budget", "interval", "against"}

Row = Mapping[str, Any]


def fill(text: str, folder: Path) -> str:
    """Return a document with every table written anew.

    Args:
        text: the document.
        folder: of result files.

    Raises:
        ValueError: a description or a file that is not valid, or a row that no file
            has.
    """

    def one(found: re.Match) -> str:
        return found[1] + render(found[2], folder) + found[4]

    return BLOCK.sub(one, text)


def render(description: str, folder: Path) -> str:
    """Return one table as Markdown with a line end; see `fill`."""
    try:
        wanted = yaml.safe_load(description)
    except yaml.YAMLError as error:
        raise ValueError(f"table: cannot read {description!r}: {error}") from None
    if not isinstance(wanted, dict) or not {"files", "rows"} <= wanted.keys() <= KEYS:
        raise ValueError(
            f"table: expected files, rows and any of {sorted(KEYS)}, got {wanted!r}"
        )
    records = [read_record(folder / name) for name in wanted["files"]]
    families = list(dict.fromkeys(row["family"] for row in records[0]["summary"]))
    families.remove(POOLED)
    against = wanted.get("against")
    header = ["policy", *families, "answers cut off"]
    header += [f"against {against}: right alone, wrong alone, p"] if against else []
    lines = [header, ["---"] * len(header)]
    for name in wanted["rows"]:
        policy, star = name.removesuffix("*"), name.endswith("*")
        if star >= len(records):
            raise ValueError(f"table: expected a second file for {name}, got one")
        record = records[star]
        rows = rows_of(record, policy, wanted)
        missing = [family for family in [*families, POOLED] if family not in rows]
        if missing:
            raise ValueError(
                f"table: expected {missing} of {policy} in {wanted['files'][star]}, "
                "got none; choose another budget, interval or row"
            )
        cells = [f"`{policy}`{' *' if star else ''}"]
        cells += [share_of(rows[family]) for family in families]
        cells.append(f"{100 * rows[POOLED]['capped']:.0f} %")
        cells += [pair_of(record, rows[POOLED], against)] if against else []
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace(
        "| --- " * len(header) + "|", "|---" * len(header) + "|"
    )


def read_record(path: Path) -> dict[str, Any]:
    """Return a result file of benchmarks.accuracy.

    Raises:
        ValueError: it cannot be read, or is another file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"results: cannot read {path}: {error}") from None
    if not isinstance(record, dict) or "summary" not in record:
        raise ValueError(f"results: expected a summary of accuracy, got {path}")
    return record


def rows_of(record: Row, policy: str, wanted: Row) -> dict[str, Row]:
    """Return a policy's rows by family, at the budget and interval that are wanted.

    Raises:
        ValueError: several budgets or intervals, and none is named.
    """
    rows: dict[str, Row] = {}
    for row in record["summary"]:
        if row["policy"] != policy:
            continue
        # FULL has neither; files of one interval say it in their settings.
        places = [] if policy == FULL else ["budget", "interval"]
        if any(row.get(key) != wanted.get(key, row.get(key)) for key in places):
            continue
        if row["family"] in rows:
            raise ValueError(
                f"table: expected budget and interval beside several of {policy}, got "
                f"{dict(wanted)}"
            )
        rows[row["family"]] = row
    return rows


def share_of(row: Row) -> str:
    """Return the share right in per cent, with its interval."""
    share, low, high = (100 * row[key] for key in ("accuracy", "low", "high"))
    return f"{share:.0f} [{low:.0f}, {high:.0f}]"


def pair_of(record: Row, row: Row, against: str) -> str:
    """Return the paired test of a pooled row; a dash where there is none.

    Args:
        record: the result file.
        row: of it.
        against: `full`, or `base` for the policy without its variant or, where it has
            none, for the scorer without an allocator.
    """
    bases = bases_of(row["policy"])
    others = bases[:1] if against == FULL else bases[1:2]
    for pair in record.get("pairs", ()):
        keys = ("policy", "budget", "interval", "family")
        same = all(pair[key] == row[key] for key in keys)
        if same and pair["against"] in others:
            return f"{pair['only_policy']}, {pair['only_other']}, {pair['p']:.2g}"
    return "-"


def figure_names(text: str) -> Sequence[str]:
    """Return the files in `figures/` that a document shows."""
    return re.findall(r"\]\(figures/([^)]+\.png)\)", text)
