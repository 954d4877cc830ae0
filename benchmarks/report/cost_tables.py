"""Makes tables of policies with their scores and what the server measured."""

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.accuracy.groups import POOLED
from benchmarks.accuracy.servers import DTYPE, FULL
from benchmarks.report.policy_tables import rows_of
from benchmarks.report.records import SCORES, Row, check_keys, read, share_of
from benchmarks.workload import VALUE_BYTES

WIDTH = "width"
"""Bytes of a number in a row's cache over those in the first file's."""


def by_column(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of all tasks together, a row per policy.

    Args:
        wanted: `file`, or `files` of several caches; `rows`, a mapping from labels to
            policies, which over a cache of another dtype than the model's are called
            `NAME@DTYPE`; `columns`, one from headings to keys of COLUMNS; `budget` and
            `interval`, by default the only ones.

    Raises:
        ValueError: see `tables.fill`, or a row without what a column shows.
    """
    files = "files" if "files" in wanted else "file"
    check_keys(wanted, {files, "rows", "columns"}, {"budget", "interval"})
    names = wanted.get("files", [wanted.get("file")])
    records = {_cache_of(found): found for found in (read(folder / n) for n in names)}
    if len(records) < len(names):
        raise ValueError(f"table: expected files of different caches, got {names}")
    unknown = [name for name in wanted["columns"].values() if name not in COLUMNS]
    if unknown:
        raise ValueError(f"table: expected columns of {list(COLUMNS)}, got {unknown}")
    table = [["policy", *wanted["columns"]]]
    first = next(iter(records.values()))
    for label, named in wanted["rows"].items():
        policy, _, cache = named.partition("@")
        record = records.get(cache, {"summary": ()})
        found = rows_of(record, policy, wanted).get(POOLED)
        if found is None:
            raise ValueError(f"table: expected {named} in {wanted[files]}, got none")
        row = {**found, WIDTH: _width(record) / _width(first)}
        row[FULL] = rows_of(first, FULL, wanted).get(POOLED, {})
        cells = (COLUMNS[name](row) for name in wanted["columns"].values())
        table.append([label, *cells])
    return table


def _cache_of(record: Row) -> str:
    """Return the dtype of a file's KV cache, empty for that of the model."""
    return record["settings"].get("kv_cache_dtype", "")


def _width(record: Row) -> int:
    """Return the bytes of a number in a file's KV cache."""
    own = VALUE_BYTES[record["settings"].get("dtype", DTYPE)]
    return 1 if _cache_of(record) else own


def _bytes(row: Row) -> str:
    """Return the bytes held over those of full KV in the first file."""
    ours, theirs = (
        _measured(one, "held_tokens")["held_tokens"] for one in (row, row[FULL])
    )
    return f"{row[WIDTH] * ours / theirs:.2f}"


def _measured(row: Row, name: str) -> Row:
    """Return what a server measured, or its ratios to full KV."""
    found = row.get("measured") or {}
    if name not in found:
        policy = row.get("policy", FULL)
        raise ValueError(f"table: expected {name!r} of {policy}, got none")
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
    "held_bytes": _bytes,
    "held_share": _share("held_tokens", has_range=False),
    "held_shares": _share("held_tokens", has_range=True),
    "speeds": _share("tok_s", has_range=True),
}
"""Scores, with their interval; tokens per KV head; bytes over those of full KV in the
first file; ratios to full KV, of all tasks and in the plural also the smallest and the
largest of a task."""
