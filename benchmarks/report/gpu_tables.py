"""Makes the tables of the benchmark on a GPU, those that it prints itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.__main__ import DEFAULT_MODEL, PARTS
from benchmarks.gpu.check import runner
from benchmarks.gpu.parts import Options
from benchmarks.report.records import Row, check_keys, read


def by_part(wanted: Row, folder: Path) -> list[list[str]]:
    """Return the table of a part.

    Args:
        wanted: `part`, one of `benchmarks.gpu`.
        folder: folder of the files.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"part"})
    name = wanted["part"]
    if name not in PARTS:
        raise ValueError(f"table: expected a part of {sorted(PARTS)}, got {name!r}")
    record = read(folder / "gpu" / f"gpu-{name}.json", "cells")
    cells: Any = SimpleNamespace(**record)
    options = Options(DEFAULT_MODEL, folder, 0.0)
    header, rows = PARTS[name].table(cells, options)
    return [header, *rows]


def checks(wanted: Row, folder: Path) -> list[list[str]]:
    """Return the groups of checks of the last run in a file, and what failed.

    Args:
        wanted: `file`, of `python -m benchmarks.gpu check`.
        folder: folder of the file.

    Raises:
        ValueError: see `tables.fill`.
    """
    check_keys(wanted, {"file"})
    lines = runner.lines_of(folder / wanted["file"])
    rows = []
    for group in dict.fromkeys(line["group"] for line in lines):
        mine = [line for line in lines if line["group"] == group]
        ran = [line for line in mine if not line["detail"].startswith("NOT RUN")]
        failed = [line["check"] for line in ran if not line["ok"]]
        passed = f"{len(ran) - len(failed)} of {len(ran)}"
        rows.append([f"`{group}`", passed, "; ".join(failed) or "-"])
    return [["group", "passed", "failed"], *sorted(rows)]
