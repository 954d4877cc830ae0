"""Makes a record of output files: the loss of every text under every policy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.results import Line, merge
from benchmarks.provenance import collect

LOSSES = "losses"
DIGITS = 4


def rows_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a row per policy, budget and interval, in the order of the lines.

    Args:
        lines: of output files, each text once.

    Returns:
        Rows with `texts`, their ids; `loss`: of each, nats; `places`: means over the
        texts, see `losses.figures`.
    """
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        place = line["policy"], line["budget"], line["interval"]
        groups.setdefault(place, []).append(line)
    rows = []
    for (policy, budget, interval), members in groups.items():
        columns = zip(*(line["places"] for line in members), strict=True)
        rows.append(
            {
                "policy": policy,
                "budget": budget,
                "interval": interval,
                "texts": [line["id"] for line in members],
                "loss": [line["loss"] for line in members],
                "places": [round(sum(some) / len(some), DIGITS) for some in columns],
            }
        )
    return rows


def of_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the record of output files with equal settings.

    Returns:
        `provenance`, `settings`, and `rows`, see `rows_of`; the ids of all texts stand
        once in `texts` where every row has the same.

    Raises:
        ValueError: settings differ, or rows have different texts.
    """
    settings, lines = merge(paths)
    rows = rows_of(lines)
    texts = rows[0]["texts"]
    for row in rows:
        if sorted(row["texts"]) != sorted(texts):
            raise ValueError(
                f"record: {row['policy']} at {row['budget']}/{row['interval']} has "
                f"{len(row['texts'])} texts, expected the {len(texts)} of "
                f"{rows[0]['policy']}; finish the run first"
            )
        by_text = dict(zip(row.pop("texts"), row["loss"], strict=True))
        row["loss"] = [by_text[text] for text in texts]
    return {
        "provenance": collect("benchmarks.language"),
        "settings": settings,
        "texts": texts,
        "rows": rows,
    }


def compact(record: dict[str, Any]) -> str:
    """Return a record as JSON with a line per row."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    head = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n'
