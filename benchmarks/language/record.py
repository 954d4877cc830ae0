"""Makes a record of output files: the figures of every item under every policy."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accuracy.results import Line, merge
from benchmarks.language.parts import PARTS
from benchmarks.provenance import collect

DIGITS = 4
PLACES = "places"
HELD = ("held", "kept", "sinks_held")
"""What lines of losses and tasks may have, and those of `benchmarks.peer.losses`."""


def rows_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a row per part, policy, budget and interval, in the order of the lines.

    Returns:
        Rows with `part`; `ids` and `kinds` of the items; the part's figures by name, a
        number per item; and means over the texts of `places`, see
        `losses.figures`, and of HELD.
    """
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        place = line["task"], line["policy"], line["budget"], line["interval"]
        groups.setdefault(place, []).append(line)
    return [_row(*place, members) for place, members in groups.items()]


def _row(
    part: str, policy: str, budget: int, interval: int, members: Sequence[Line]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "part": part,
        "policy": policy,
        "budget": budget,
        "interval": interval,
        "ids": [line["id"] for line in members],
        "kinds": [line["kind"] for line in members],
    }
    row |= {name: [line[name] for line in members] for name in PARTS[part].names}
    if PLACES in members[0]:
        columns = zip(*(line[PLACES] for line in members), strict=True)
        row[PLACES] = [round(fmean(some), DIGITS) for some in columns]
    for name in HELD:
        if members[0].get(name) is not None:
            row[name] = round(fmean(line[name] for line in members), DIGITS)
    return row


def of_files(
    paths: Sequence[Path], module: str = "benchmarks.language"
) -> dict[str, Any]:
    """Return the record of output files with equal settings.

    Returns:
        `provenance`, `settings`; `items`: part -> id -> kind; and `rows`, see
        `rows_of`, whose figures are in the order of the items.

    Raises:
        ValueError: settings differ, or rows of a part have different items.
    """
    settings, lines = merge(paths)
    items: dict[str, dict[str, str]] = {}
    rows = rows_of(lines)
    for row in rows:
        ids, kinds = row.pop("ids"), row.pop("kinds")
        known = items.setdefault(row["part"], dict(zip(ids, kinds, strict=True)))
        if sorted(ids) != sorted(known):
            raise ValueError(
                f"record: {row['policy']} at {row['budget']}/{row['interval']} has "
                f"{len(ids)} items of {row['part']}, expected {len(known)}; finish the "
                "run first"
            )
        for name in PARTS[row["part"]].names:
            by_id = dict(zip(ids, row[name], strict=True))
            row[name] = [by_id[each] for each in known]
    provenance = collect(module)
    return {
        "provenance": provenance,
        "settings": settings,
        "items": items,
        "rows": rows,
    }


def compact(record: dict[str, Any]) -> str:
    """Return a record as JSON with a line per row."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    head = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n'
