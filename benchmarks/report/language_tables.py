"""Makes the tables of the language benchmark: log-loss under eviction."""

from pathlib import Path
from statistics import fmean

from benchmarks.accuracy.servers import FULL
from benchmarks.report.records import Row, check_keys, read
from benchmarks.stats import estimate_difference, holm

LOSSES = "losses"
"""The part of the benchmark that the tables are of."""

Place = tuple[str, int, int]
"""Policy, budget, interval."""


def losses(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of losses above full KV, a row per policy, best first.

    Args:
        wanted: `files`, of equal texts; `places`, a list of [budget, interval], by
            default the first file's; `rows`, by default all policies. The rows are in
            the order of the first place.
        folder: folder of the files.

    Raises:
        ValueError: see `tables.fill`, or a policy without a row.
    """
    check_keys(wanted, {"files"}, {"places", "rows"})
    found = _read(wanted, folder)
    places = _places(wanted, found)
    known = dict.fromkeys(policy for policy, *_ in found)
    names = wanted.get("rows", [name for name in known if name != FULL])
    means = {name: fmean(_loss(found, name, *places[0])) for name in names}
    table = [["policy", *(f"budget {k}, interval {i}" for k, i in places)]]
    full = [f"{fmean(_loss(found, FULL, *place)):.3f} nats" for place in places]
    table.append([f"`{FULL}`", *full])
    for name in sorted(names, key=means.__getitem__):
        above = [
            estimate_difference(_loss(found, name, *place), _loss(found, FULL, *place))
            for place in places
        ]
        cells = [
            f"{some.mean:+.3f} [{some.low:.3f}, {some.high:.3f}]" for some in above
        ]
        table.append([f"`{name}`", *cells])
    return table


def loss_comparisons(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of paired differences of losses, below 0 where the first is.

    The p values are corrected by Holm for all tests that the table has.

    Args:
        wanted: `files`, of equal texts; `pairs`, a list of [policy, other]; `places`, a
            list of [budget, interval], by default the first file's.
        folder: folder of the files.

    Raises:
        ValueError: see `tables.fill`, or a policy without a row.
    """
    check_keys(wanted, {"files", "pairs"}, {"places"})
    found = _read(wanted, folder)
    rows, tests = [], []
    for ours, theirs in wanted["pairs"]:
        for budget, interval in _places(wanted, found):
            first = _loss(found, ours, budget, interval)
            second = _loss(found, theirs, budget, interval)
            test = estimate_difference(first, second)
            lower = sum(a < b for a, b in zip(first, second, strict=True))
            rows.append(
                [
                    f"`{ours}`",
                    f"`{theirs}`",
                    f"{budget}, {interval}",
                    f"{test.mean:+.3f} [{test.low:+.3f}, {test.high:+.3f}]",
                    f"{lower} of {len(first)}",
                ]
            )
            tests.append(test.p)
    header = ["policy", "against", "budget, interval", "difference [95 %], nats"]
    return [[*header, "texts lower", "p"]] + [
        [*row, f"{p:.2g}"] for row, p in zip(rows, holm(tests), strict=True)
    ]


def _read(wanted: Row, folder: Path) -> dict[Place, list[float]]:
    """Return losses of the texts by policy, budget and interval."""
    texts: list[str] = []
    found: dict[Place, list[float]] = {}
    for name in wanted["files"]:
        record = read(folder / name, "rows")
        own = list(record["items"].get(LOSSES, ()))
        if texts and own != texts:
            raise ValueError(f"table: expected equal texts in {wanted['files']}")
        texts = own
        for row in record["rows"]:
            if row["part"] == LOSSES:
                place = row["policy"], row["budget"], row["interval"]
                found.setdefault(place, row["loss"])
    return found


def _places(wanted: Row, found: dict[Place, list[float]]) -> list[tuple[int, int]]:
    """Return budgets and intervals that a table shows."""
    known = dict.fromkeys((budget, interval) for _, budget, interval in found)
    return [(budget, interval) for budget, interval in wanted.get("places", known)]


def _loss(
    found: dict[Place, list[float]], policy: str, budget: int, interval: int
) -> list[float]:
    if (policy, budget, interval) not in found:
        raise ValueError(
            f"table: expected {policy} at {budget}, {interval}, got none; choose "
            "another place or row"
        )
    return found[policy, budget, interval]
