"""Makes the table of margins: what methods get more than another for the same cost."""

from pathlib import Path

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.votes import COSTS, MEASURES
from benchmarks.report.records import Row, check_keys, read


def by_family(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of margins in points, a row per method, a column per family.

    Args:
        wanted: `file`; `cost`, one of COSTS; `measure`, one of MEASURES, by default the
            first; `rows`, methods, by default all of the file.
    """
    check_keys(wanted, {"file", "cost"}, {"measure", "rows"})
    asked = {"cost": wanted["cost"], "measure": wanted.get("measure", MEASURES[0])}
    for key, valid in (("cost", COSTS), ("measure", MEASURES)):
        if asked[key] not in valid:
            raise ValueError(f"table: expected {key} of {valid}, got {asked[key]!r}")
    record = read(folder / wanted["file"], "margins")
    rows = [row for row in record["margins"] if row.items() >= asked.items()]
    families = list(dict.fromkeys(row["family"] for row in rows))
    families = [POOLED, *(family for family in families if family != POOLED)]
    found = {(row["method"], row["family"]): row for row in rows}
    methods = wanted.get("rows", list(dict.fromkeys(row["method"] for row in rows)))
    if missing := [method for method in methods if (method, POOLED) not in found]:
        raise ValueError(f"table: expected {missing} in {wanted['file']}, got none")
    header = ["method", "all", *families[1:], "from", "to"]
    cells = [
        [
            f"`{method}`",
            *(_margin(found.get((method, family))) for family in families),
            *(f"{found[method, POOLED][end]:,.0f}" for end in ("from", "to")),
        ]
        for method in methods
    ]
    return [header, *cells]


def _margin(row: Row | None) -> str:
    """Return a margin in points with its interval; a dash where no cost is shared."""
    if row is None:
        return "-"
    value, low, high = (100 * row[key] for key in ("margin", "low", "high"))
    return f"{value:+.1f} [{low:.1f}, {high:.1f}]"
