"""Reads result files for tables and figures."""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from benchmarks import packed
from benchmarks.accuracy.partial import PARTIAL

Row = Mapping[str, Any]

ANSWER = "answer"
"""The score of an answer that is right or wrong, as a whole."""
SCORES = (ANSWER, *PARTIAL)


def read(path: Path, key: str | None = "summary") -> dict[str, Any]:
    """Return a result file.

    Args:
        key: required key; "summary" for a file of benchmarks.accuracy; None for none.

    Raises:
        ValueError: it cannot be read, or lacks the key.
    """
    try:
        record = json.loads(packed.read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"results: cannot read {path}: {error}") from None
    if not isinstance(record, dict) or (key is not None and key not in record):
        raise ValueError(f"results: expected a file with {key!r}, got {path}")
    return record


def check_keys(wanted: Row, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raise ValueError if a table's description lacks a key or has an unknown one."""
    if not needed <= wanted.keys() <= needed | optional:
        raise ValueError(
            f"table: expected {sorted(needed)} and any of {sorted(optional)}, got "
            f"{dict(wanted)!r}"
        )


def share_of(row: Row, score: str = ANSWER) -> str:
    """Return the mean of a score in per cent, with its interval.

    Raises:
        ValueError: the row lacks the score.
    """
    if score == ANSWER:
        found = {"mean": row["accuracy"], "low": row["low"], "high": row["high"]}
    else:
        found = known_score(row, score)
    mean, low, high = (100 * found[key] for key in ("mean", "low", "high"))
    return f"{mean:.0f} [{low:.0f}, {high:.0f}]"


def known_score(row: Row, score: str) -> Row:
    """Return a partial score of a row or of a pair.

    Raises:
        ValueError: it has none.
    """
    if not row.get(score):
        raise ValueError(
            f"table: expected a file with the score {score!r} of {row['policy']}, got "
            f"one without; choose {ANSWER!r} or another file"
        )
    return row[score]
