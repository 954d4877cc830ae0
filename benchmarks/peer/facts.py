"""Stores facts that output files lack: provenance, refusals and concurrencies."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.accuracy.results import Line

NAME = "commands.json"
"""Of the file in the folder."""
PLACE = ("policy", "budget", "interval")

Place = tuple[str, int | None, int | None]
"""Row, budget, interval."""
Refusal = dict[str, Any]
"""PLACE, `answers`: those that were there before, `message`."""


def read(folder: Path) -> dict[str, Any]:
    """Return the facts of a folder by command; empty before the first one."""
    path = folder / NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts of a folder."""
    (folder / NAME).write_text(json.dumps(facts), encoding="utf-8")


def place_of(fields: Mapping[str, Any]) -> Place:
    """Return policy, budget and interval of a line or a row."""
    return fields["policy"], fields["budget"], fields["interval"]


def merged(
    known: Iterable[Refusal],
    new: Mapping[Place, str],
    asked: Collection[Place],
    lines: Iterable[Line],
) -> list[Refusal]:
    """Return all refusals that are still valid.

    Args:
        known: refusals of earlier commands with the same settings.
        new: this command's refusals: message by place.
        asked: places that this command tried; only its refusals count for them.
        lines: lines of the output file; a place with new answers is no longer refused.
    """
    there = Counter(place_of(line) for line in lines)
    kept = [
        refusal
        for refusal in known
        if place_of(refusal) not in asked
        and there[place_of(refusal)] == refusal["answers"]
    ]
    return kept + [
        dict(zip(PLACE, place, strict=True))
        | {"answers": there[place], "message": message}
        for place, message in new.items()
    ]
