"""Makes the tables that compare the peer with us."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.accuracy.groups import POOLED
from benchmarks.peer.catalogue import SORTED
from benchmarks.peer.facts import PLACE, place_of
from benchmarks.report.policy_tables import rows_of
from benchmarks.report.records import Row, check_keys, read, share_of

SHIPPED, ORDERED = "kvpress as shipped", "kvpress, cache kept in order"
TEST = "against ours: right alone, wrong alone, p"
HELD = "first 4 tokens held after event 1, 2, last"


def side_by_side(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table with the peer's rows, as shipped and sorted, and ours.

    Args:
        wanted: `file`; `budget` and `interval`, by default the only ones.
    """
    record = _read(wanted, folder)
    header = ["policy", SHIPPED, ORDERED, "ours", f"as shipped {TEST}"]
    header += [f"in order {TEST}", f"{HELD}, as shipped", f"{HELD}, in order"]
    rows = []
    for policy, own in _ours(record, wanted):
        names = policy, f"{policy}:{SORTED}"
        pair = [_theirs(record, name, own) for name in names]
        rows.append([f"`{policy}`"])
        rows[-1] += [one if isinstance(one, str) else share_of(one) for one in pair]
        rows[-1].append(share_of(own))
        rows[-1] += [_test(record, name, own) for name in names]
        rows[-1] += ["-" if isinstance(one, str) else _sinks(one) for one in pair]
    return [header, *rows]


def speeds(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of output tokens per second, the peer's and ours.

    Args:
        wanted: `file`; `budget` and `interval`, by default the only ones.
    """
    record = _read(wanted, folder)
    found = {
        (place_of(row), row["concurrency"]): row["tok_s"]
        for row in record["ours"]["speeds"]
    }
    counts = sorted({count for _, count in found})
    header = ["policy", f"{SHIPPED}, one at a time"]
    header += [f"ours, {count} at once" for count in counts]
    rows = []
    for policy, own in _ours(record, wanted):
        theirs = _theirs(record, policy, own)
        cells = [theirs if isinstance(theirs, str) else f"{theirs['tok_s']:.0f}"]
        for count in counts:
            speed = found.get((place_of(own), count))
            cells.append("-" if speed is None else f"{speed:.0f}")
        rows.append([f"`{policy}`", *cells])
    return [header, *rows]


def _read(wanted: Row, folder: Path) -> Row:
    """Return the record after checking that it has both sides."""
    check_keys(wanted, {"file"}, set(PLACE) - {"policy"})
    return read(folder / wanted["file"], "against_ours")


def _ours(record: Row, wanted: Row) -> Iterator[tuple[str, Row]]:
    """Yield our policies with their row of all tasks, at one budget and interval.

    Raises:
        ValueError: several budgets or intervals and none named, or not the named one.
    """
    rows = record["ours"]["summary"]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        found = rows_of(record["ours"], policy, wanted)
        if POOLED not in found:
            raise ValueError(
                f"table: expected {policy} at {dict(wanted)}, got none; choose another "
                "budget or interval"
            )
        yield policy, found[POOLED]


def _theirs(record: Row, name: str, own: Row) -> Row | str:
    """Return the peer's row for our policy, or the word that replaces it."""
    place = name, *place_of(own)[1:]
    if place in map(place_of, record["refused"]):
        return "refused"
    found = [row for row in record["summary"] if place_of(row) == place]
    return next((row for row in found if row["family"] == POOLED), "-")


def _test(record: Row, name: str, own: Row) -> str:
    """Return the paired test of a peer's row against ours; a dash without one."""
    if isinstance(_theirs(record, name, own), str):
        return "-"
    place = name, *place_of(own)[1:]
    for test in record["against_ours"]:
        if place_of(test) == place:
            return f"{test['only_peer']}, {test['only_ours']}, {test['p']:.2g}"
    return "-"


def _sinks(row: Row) -> str:
    """Return the shares of the first tokens that heads still hold, in per cent."""
    held = [row["sinks_held"][event] for event in ("first", "second", "last")]
    return ", ".join("-" if share is None else f"{100 * share:.0f} %" for share in held)
