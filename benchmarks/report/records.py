"""Reads result files for tables and figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def read(path: Path, key: str = "summary") -> dict[str, Any]:
    """Return a result file.

    Args:
        path: JSON.
        key: required key; "summary" for a file of benchmarks.accuracy.

    Raises:
        ValueError: it cannot be read, or lacks the key.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"results: cannot read {path}: {error}") from None
    if not isinstance(record, dict) or key not in record:
        raise ValueError(f"results: expected a file with {key!r}, got {path}")
    return record


def check_keys(wanted: Row, needed: set[str], optional: set[str]) -> None:
    """Raise ValueError if a table's description lacks a key or has an unknown one."""
    if not needed <= wanted.keys() <= needed | optional:
        raise ValueError(
            f"table: expected {sorted(needed)} and any of {sorted(optional)}, got "
            f"{dict(wanted)!r}"
        )


def share_of(row: Row) -> str:
    """Return the share right in per cent, with its interval."""
    share, low, high = (100 * row[key] for key in ("accuracy", "low", "high"))
    return f"{share:.0f} [{low:.0f}, {high:.0f}]"
