"""Makes the tables of the benchmark on a GPU, those that it prints itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.check import runner
from benchmarks.report.records import Row, check_keys, read

LARGE_CARD = 2**40
"""Bytes of a card on which every part measures all that it has."""


def by_part(wanted: Row, folder: Path) -> list[list[str]]:
    """Return what a part measured, or its figures beside their targets.

    Args:
        wanted: `part`, one of `benchmarks.gpu`, or `targets`, several of them.
    """
    from benchmarks.gpu.contents import DEFAULT_MODEL, PARTS  # imports vLLM
    from benchmarks.gpu.parts import Options

    class Anywhere(Options):
        """Options of a card that is not there."""

        card_bytes = LARGE_CARD

    check_keys(wanted, set(), {"part", "targets"})
    options, found = Anywhere(DEFAULT_MODEL, folder, 0.0), []
    for name in wanted.get("targets", [wanted.get("part")]):
        if name not in PARTS:
            raise ValueError(f"table: expected a part of {sorted(PARTS)}, got {name!r}")
        paths = sorted((folder / "gpu").glob(f"gpu-{name}.json*"))  # packed or not
        if len(paths) != 1:
            raise ValueError(f"table: expected a file of {name!r}, got {paths}")
        record = read(paths[0], "cells")
        cells: Any = SimpleNamespace(**record)
        if "part" in wanted:
            header, rows = PARTS[name].table(cells, options)
            return [header, *rows]
        verdicts = PARTS[name].verdicts(cells, options)
        found += [[name, *verdict.row()] for verdict in verdicts]
    return [["part", "figure", "is", "target", ""], *found]


def checks(wanted: Row, folder: Path) -> list[list[str]]:
    """Return the groups of checks in a file, each in its last run, and what failed.

    Args:
        wanted: `file`, of `python -m benchmarks.gpu check`.
    """
    check_keys(wanted, {"file"})
    rows = []
    for group, mine in runner.last_runs(folder / wanted["file"]).items():
        ran = [line for line in mine if not line["detail"].startswith("NOT RUN")]
        failed = [line["check"] for line in ran if not line["ok"]]
        counts = len(ran) - len(failed), len(failed), len(mine) - len(ran)
        rows.append([f"`{group}`", *map(str, counts), "; ".join(failed) or "-"])
    rows.sort()
    sums = [str(sum(int(row[column]) for row in rows)) for column in (1, 2, 3)]
    header = ["group", "passed", "failed", "not run", "what failed"]
    return [header, *rows, ["all", *sums, ""]]
