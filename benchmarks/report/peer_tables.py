"""Owns the tables of the peer beside us.

Called by tables, on the record of `python -m benchmarks.peer`.
"""

from pathlib import Path

from benchmarks.accuracy.summary import POOLED
from benchmarks.peer.catalogue import SORTED
from benchmarks.report.records import Row, check_keys, read, share_of


def side_by_side(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with the peer's rows, as shipped and sorted, and ours.

    Args:
        wanted: `file`.
        folder: of the file.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"file"}, set())
    record = read(folder / wanted["file"])
    theirs = {row["policy"]: row for row in record["summary"] if _pooled(row)}
    ours = {row["policy"]: row for row in record["ours"]["summary"] if _pooled(row)}
    tests = {row["policy"]: row for row in record["against_ours"]}
    header = ["policy", "kvpress, % right", "its cache kept in order", "ours"]
    header += ["shipped against ours: right alone, wrong alone, p"]
    header += ["first 4 tokens held after event 1, 2, last", "sorted"]
    rows = []
    for policy in ours:
        if policy in record["refused"]:
            rows.append([f"`{policy}`", "refused", "-", share_of(ours[policy])])
            rows[-1] += ["-"] * 3
            continue
        shipped, ordered = theirs[policy], theirs.get(f"{policy}:{SORTED}")
        test = tests[policy]
        rows.append(
            [
                f"`{policy}`",
                share_of(shipped),
                share_of(ordered) if ordered else "-",
                share_of(ours[policy]),
                f"{test['only_peer']}, {test['only_ours']}, {test['p']:.2g}",
                _sinks(shipped),
                _sinks(ordered) if ordered else "-",
            ]
        )
    return [header, *rows]


def speeds(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of output tokens per second, the peer's and ours.

    Args:
        wanted: `file`.
        folder: of the file.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"file"}, set())
    record = read(folder / wanted["file"])
    theirs = {row["policy"]: row["tok_s"] for row in record["summary"] if _pooled(row)}
    ours = {
        (row["policy"], row["concurrency"]): row["tok_s"]
        for row in record["ours"]["speeds"]
    }
    counts = sorted({count for _, count in ours})
    header = ["policy", "kvpress, one at a time"]
    header += [f"ours, {count} at once" for count in counts]
    rows = [
        [
            f"`{policy}`",
            f"{theirs[policy]:.0f}" if policy in theirs else "refused",
            *(f"{ours[policy, count]:.0f}" for count in counts),
        ]
        for policy in dict.fromkeys(policy for policy, _ in ours)
    ]
    return [header, *rows]


def _pooled(row: Row) -> bool:
    return row["family"] == POOLED


def _sinks(row: Row) -> str:
    """Return the shares of the first tokens that a head still holds, in per cent."""
    held = [row["sinks_held"][event] for event in ("first", "second", "last")]
    return ", ".join("-" if share is None else f"{100 * share:.0f} %" for share in held)
