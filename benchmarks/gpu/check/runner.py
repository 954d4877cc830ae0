"""Runs groups of checks in separate processes and collects their outcomes."""

import json
import os
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
GRACE_SECONDS = 5.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "4",  # groups share the cores
}
MAX_DETAIL = 160
Line = dict[str, Any]


class Checks:
    """Writes the outcome of each check of a group to a file as soon as it is known.

    Args:
        group: name of the group.
        path: file to append to, one JSON object per line.
    """

    def __init__(self, group: str, path: Path) -> None:
        self.group, self.path = group, path

    @contextmanager
    def case(self, name: str) -> Iterator[list[str]]:
        """Run a check: it passes if the block raises nothing.

        Yields:
            A list for notes, which end up in the check's line of the table.
        """
        started, notes = time.monotonic(), []
        try:
            yield notes
            is_good = True
        except Exception as error:
            traceback.print_exc()
            is_good = False
            notes.insert(0, f"{type(error).__name__}: {error}".splitlines()[0])
        line = {
            "group": self.group,
            "check": name,
            "ok": is_good,
            "seconds": round(time.monotonic() - started, 1),
            "detail": "; ".join(notes),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def environment() -> dict[str, str]:
    """Return the environment of a group's process, which imports tests/support."""
    folders = os.environ.get("PYTHONPATH"), str(ROOT / "tests")
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def run_group(
    command: Sequence[str], name: str, folder: Path, end: float
) -> list[Line]:
    """Run a group in its own process; return its checks.

    Args:
        command: runs a group; gets `--group NAME --lines FILE`.
        name: of the group.
        folder: for its file.
        end: the time by which it must end, in seconds of `time.monotonic`.
    """
    path, started = folder / f"{name}.jsonl", time.monotonic()
    problem = None
    if started >= end:
        problem = "not begun: out of time"
    else:
        words = [*command, "--group", name, "--lines", str(path)]
        try:
            status = subprocess.run(
                words, cwd=ROOT, env=environment(), timeout=end - started
            ).returncode
        except subprocess.TimeoutExpired:
            problem = f"cut off after {time.monotonic() - started:.0f} s"
        else:
            problem = f"its process ended with status {status}" if status else None
    written = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(line) for line in written]
    if problem is None and not lines:
        problem = "it checked nothing"
    if problem is not None:
        seconds = round(time.monotonic() - started, 1)
        line = {"group": name, "check": "the whole group", "ok": False}
        lines.append(line | {"seconds": seconds, "detail": problem})
    return lines


def run_all(
    command: Sequence[str], names: Sequence[str], jobs: int, seconds: float
) -> list[Line]:
    """Run groups in parallel; return all checks, group by group."""
    end = time.monotonic() + seconds - GRACE_SECONDS
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(max_workers=jobs) as pool,
    ):
        run = partial(run_group, command, folder=Path(folder), end=end)
        found = pool.map(run, names)
        return [line for lines in found for line in lines]


def table(lines: Sequence[Line]) -> str:
    """Return the checks as lines of text."""
    rows = [
        (
            "ok  " if line["ok"] else "FAIL",
            line["group"],
            line["check"],
            f"{line['seconds']:.1f} s",
            line["detail"][:MAX_DETAIL],
        )
        for line in lines
    ]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:4]]
    return "\n".join(
        "  ".join([*map(str.ljust, row[:4], widths), row[4]]).rstrip() for row in rows
    )
