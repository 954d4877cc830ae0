"""Makes the tables of the language benchmark: log-loss, tasks and agreement."""

from collections.abc import Collection
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from benchmarks.accuracy.servers import FULL
from benchmarks.report.records import Row, check_keys, read
from benchmarks.stats import estimate_difference, estimate_mean, holm

LOSSES = "losses"
"""The part of the benchmark that most tables are of."""
LOSS = "loss"
"""The figure that they show."""
SHARES = (
    *("right", "equal", "top"),
    *("first_right", "second_right", "alone_right", "cached"),
)
"""Figures that are shares, shown in %."""
LOWER_IS_BETTER = (LOSS, "kl")

Place = tuple[str, int, int]
"""Policy, budget, interval."""


def losses(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of losses above full KV, a row per policy, best first.

    Files of runs over another cache alone have full KV over that one.

    Args:
        wanted: `files`, of which the texts count that all have; `places`, a list of
            [budget, interval], by default the first file's; `rows`, by default all
            policies; `held`, true for what was held at the first place, relative to
            full KV. The rows are in the order of the first place.

    Raises:
        ValueError: see `tables.fill`, or a policy without a row.
    """
    check_keys(wanted, {"files"}, {"places", "rows", "held"})
    found = _read(wanted, folder)
    places = _places(wanted, found)
    known = dict.fromkeys(policy for policy, *_ in found)
    base = _base(known)
    names = wanted.get("rows", [name for name in known if name != base])
    means = {name: fmean(_loss(found, name, *places[0])) for name in names}
    table = [["policy", *(f"budget {k}, interval {i}" for k, i in places)]]
    full = [f"{fmean(_loss(found, base, *place)):.3f} nats" for place in places]
    table.append([f"`{base}`", *full])
    held = {}
    if wanted.get("held"):
        held = held_of(wanted, folder, places[0])
        if lacking := [name for name in names if name not in held]:
            raise ValueError(f"table: expected what was held, got none of {lacking}")
        table[0].append("held")
        table[1].append("1")
    for name in sorted(names, key=means.__getitem__):
        above = [
            estimate_difference(_loss(found, name, *place), _loss(found, base, *place))
            for place in places
        ]
        cells = [
            f"{some.mean:+.3f} [{some.low:.3f}, {some.high:.3f}]" for some in above
        ]
        cells += [f"{held[name]:.2f}"] if wanted.get("held") else []
        table.append([f"`{name}`", *cells])
    return table


def held_of(wanted: Row, folder: Path, place: tuple[int, int]) -> dict[str, float]:
    """Return what policies held of full KV's tokens, as far as records say it."""
    part = wanted.get("part", LOSSES)
    records = [read(folder / name, "rows") for name in wanted["files"]]
    return {
        _label(record, row): row["held"]
        for record in records
        for row in record["rows"]
        if (row["budget"], row["interval"]) == place
        and row["part"] == part
        and row.get("held") is not None
    }


def _base(known: Collection[str]) -> str:
    """Return the label of full KV, in the model's dtype where that was measured."""
    others = [name for name in known if name.startswith(f"{FULL}@")]
    return FULL if FULL in known or len(others) != 1 else others[0]


def means(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of means over a part's items, a row per policy, best first.

    Args:
        wanted: `files`, of which the items count that all have; `part`; `figures`,
            names of the part's figures, a column each, after the first of which rows
            are in order; `places`, a list of [budget, interval], by default the first
            file's; `rows`, by default all policies; `held`, see `losses`, where known.

    Raises:
        ValueError: see `tables.fill`, or a policy without a row.
    """
    check_keys(wanted, {"files", "part", "figures"}, {"places", "rows", "held"})
    figures = {name: _read(wanted, folder, name) for name in wanted["figures"]}
    first, found = next(iter(figures.items()))
    places = _places(wanted, found)
    names = wanted.get("rows", list(dict.fromkeys(policy for policy, *_ in found)))
    shown = ["held"] if wanted.get("held") else []
    held = held_of(wanted, folder, places[0])
    columns = [f"{name} at {k}/{i}" for name in figures for k, i in places]
    table = [["policy", *columns, *shown]]
    best = {name: fmean(_loss(found, name, *places[0])) for name in names}
    for name in sorted(
        names, key=best.__getitem__, reverse=first not in LOWER_IS_BETTER
    ):
        cells = [
            _mean(figure, _loss(values, name, *place))
            for figure, values in figures.items()
            for place in places
        ]
        cells += [f"{held[name]:.2f}" if name in held else ""] * len(shown)
        table.append([f"`{name}`", *cells])
    return table


def tradeoff(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of several parts, with what was held beside each figure.

    Args:
        wanted: `columns`, heading -> `files`, `part` and `place`, [budget, interval],
            losses above full KV and shares of right answers; `rows`, label -> policy,
            in the order of the table. A column that lacks a policy stays empty.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"columns", "rows"})
    table = [
        ["policy", *(cell for name in wanted["columns"] for cell in (name, "held"))]
    ]
    rows = [[label] for label in wanted["rows"]]
    for about in wanted["columns"].values():
        check_keys(about, {"files", "part", "place"})
        found = points(about, folder)
        for row, policy in zip(rows, wanted["rows"].values(), strict=True):
            row += found.get(policy, Point()).cells
    return [*table, *rows]


@dataclass(frozen=True)
class Point:
    """What a policy loses and holds; nothing is known by default.

    Args:
        cells: of a table, the figure and what was held.
        mean, low, high: nats above full KV, or the share that is right.
        held: relative to full KV.
    """

    cells: tuple[str, str] = ("", "")
    mean: float = nan
    low: float = nan
    high: float = nan
    held: float = nan


def points(about: Row, folder: Path) -> dict[str, Point]:
    """Return a part's figures at one place by policy; see `tradeoff`."""
    is_loss = about["part"] == LOSSES
    found = _read(about, folder, LOSS if is_loss else "right")
    place = tuple(about["place"])
    held = held_of(about, folder, place)
    made = {}
    for (policy, *at), values in found.items():
        if tuple(at) == place:
            base = _loss(found, FULL, *place) if is_loss else None
            some = estimate_difference(values, base) if base else estimate_mean(values)
            ends = some.mean, some.low, some.high
            told = "{:+.3f} [{:.3f}, {:.3f}]".format(*ends)
            if not is_loss:
                told = _mean("right", values)
            elif policy == FULL:
                told = f"{fmean(values):.3f} nats"
            share = held.get(policy, nan)
            shown = "" if isnan(share) else f"{share:.2f}"
            made[policy] = Point((told, shown), *ends, share)
    return made


def _mean(figure: str, values: list[float]) -> str:
    """Return a mean with its interval; shares in %, a run's speed as it is."""
    if figure == "speed":
        return f"{fmean(values):.0f}"
    some = estimate_mean(values)
    ends = some.mean, some.low, some.high
    if figure in SHARES:
        return "{:.0f} % [{:.0f}, {:.0f}]".format(*(100 * end for end in ends))
    digits = 3 if figure in LOWER_IS_BETTER else 0
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*ends, d=digits)


def comparisons(wanted: Row, folder: Path) -> list[list[str]]:
    """Return a table of paired differences, below 0 where the first is lower.

    The p values are corrected by Holm for all tests that the table has.

    Args:
        wanted: `files`, of which the items count that all have; `pairs`, a list of
            [policy, other]; `places`, a list of [budget, interval], by default the
            first file's; `part` and `figure`, by default the losses of texts.

    Raises:
        ValueError: see `tables.fill`, or a policy without a row.
    """
    check_keys(wanted, {"files", "pairs"}, {"places", "part", "figure"})
    found = _read(wanted, folder, wanted.get("figure", LOSS))
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
    unit = ", nats" if wanted.get("figure", LOSS) in LOWER_IS_BETTER else ""
    header = ["policy", "against", "budget, interval", f"difference [95 %]{unit}"]
    return [[*header, "lower in", "p"]] + [
        [*row, f"{p:.2g}"] for row, p in zip(rows, holm(tests), strict=True)
    ]


def _read(wanted: Row, folder: Path, figure: str = LOSS) -> dict[Place, list[float]]:
    """Return a figure of the items that all files have, by policy, budget and interval.

    Policies are called as `_label` says.
    """
    part = wanted.get("part", LOSSES)
    records = [read(folder / name, "rows") for name in wanted["files"]]
    items = [list(record["items"].get(part, ())) for record in records]
    common = [name for name in items[0] if all(name in own for own in items)]
    if not common:
        raise ValueError(f"table: expected some {part} that are in all files")
    found: dict[Place, list[float]] = {}
    for record, own in zip(records, items, strict=True):
        taken = [own.index(name) for name in common]
        for row in record["rows"]:
            if row["part"] == part:
                if figure not in row:
                    raise ValueError(
                        f"table: expected a figure of {part}, got {figure!r}"
                    )
                place = _label(record, row), row["budget"], row["interval"]
                found.setdefault(place, [row[figure][index] for index in taken])
    return found


def _label(record: Row, row: Row) -> str:
    """Return a policy's name, with what is not usual in its run behind an `@`.

    That is the dtype of a KV cache that is not the model's, the events of a policy in a
    pool that is too small, and the pool's share.
    """
    settings = record["settings"]
    names = ["kv_cache_dtype", "events", "pool_share"]
    if row["policy"] == FULL:
        names.remove("events")
    unusual = [str(settings[name]) for name in names if settings.get(name)]
    return f"{row['policy']}@{' '.join(unusual)}" if unusual else row["policy"]


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
