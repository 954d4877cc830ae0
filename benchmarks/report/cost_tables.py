"""Makes tables of policies with their scores and what the server measured."""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.accuracy.groups import POOLED
from benchmarks.report.policy_tables import rows_of
from benchmarks.report.records import SCORES, Row, check_keys, read, share_of


def by_column(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of all tasks together, a row per policy.

    Args:
        wanted: `file`; `rows`, a mapping from labels to policies; `columns`, one from
            headings to keys of COLUMNS; `budget` and `interval`, by default the only
            ones.
        folder: folder of the file.

    Raises:
        ValueError: see `tables.fill`, or a row without what a column shows.
    """
    check_keys(wanted, {"file", "rows", "columns"}, {"budget", "interval"})
    record = read(folder / wanted["file"])
    unknown = [name for name in wanted["columns"].values() if name not in COLUMNS]
    if unknown:
        raise ValueError(f"table: expected columns of {list(COLUMNS)}, got {unknown}")
    table = [["policy", *wanted["columns"]]]
    for label, policy in wanted["rows"].items():
        found = rows_of(record, policy, wanted).get(POOLED)
        if found is None:
            raise ValueError(f"table: expected {policy} in {wanted['file']}, got none")
        cells = (COLUMNS[name](found) for name in wanted["columns"].values())
        table.append([label, *cells])
    return table


def _measured(row: Row, name: str) -> Row:
    """Return what a server measured, or its ratios to full KV."""
    found = row.get("measured") or {}
    if name not in found:
        raise ValueError(f"table: expected {name!r} of {row['policy']}, got none")
    return found


def _tokens(name: str) -> Callable[[Row], str]:
    return lambda row: f"{_measured(row, name)[name]:.0f}"


def _share(name: str, has_range: bool) -> Callable[[Row], str]:
    """Return a column of ratios to full KV, if wanted with their range over tasks."""

    def cell(row: Row) -> str:
        found = _measured(row, "to_full")["to_full"][name]
        ratio, low, high = (found[key] for key in ("ratio", "low", "high"))
        if low == high == 1:
            return "1"
        ends = f" [{low:.2f}, {high:.2f}]" if has_range else ""
        return f"{ratio:.2f}{ends}"

    return cell


def _score(name: str) -> Callable[[Row], str]:
    return lambda row: share_of(row, name)


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    **{name: _score(name) for name in SCORES},
    "held_tokens": _tokens("held_tokens"),
    "peak_tokens": _tokens("peak_tokens"),
    "held_share": _share("held_tokens", has_range=False),
    "held_shares": _share("held_tokens", has_range=True),
    "speeds": _share("tok_s", has_range=True),
}
"""Scores, with their interval; tokens per KV head; ratios to full KV, of all tasks and
in the plural also the smallest and the largest of a task."""
