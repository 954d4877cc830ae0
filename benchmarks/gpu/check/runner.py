"""Owns the groups of checks, and runs them in separate processes, without pytest.

A group names its functions, so that the list of all imports no vLLM.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import ENVIRONMENT
from benchmarks.gpu.record import ROOT, machine
from benchmarks.printing import table

JOBS = 6  # groups at a time
GRACE_SECONDS = 5.0
MAX_DETAIL = 160
TESTS = "tests"  # beside ROOT: groups use what tests share
COMMAND = (sys.executable, "-m", "benchmarks.gpu.check")
IEEE = {"TRITON_F32_DEFAULT": "ieee"}  # float32 in vLLM's kernels, not TF32
Line = dict[str, Any]


class Checks:
    """Writes the outcome of each check of a group to a file as soon as it is known.

    Args:
        path: file to append to, one JSON object per line; groups share it.

    Attributes:
        label: what the names of checks begin with.
    """

    def __init__(self, group: str, path: Path) -> None:
        self.group, self.path, self.label = group, path, ""

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
        self.add(name, is_good, time.monotonic() - started, "; ".join(notes))

    def add(self, name: str, is_good: bool, seconds: float, detail: str) -> None:
        """Write a line."""
        line = {"group": self.group, "check": self.label + name, "ok": is_good}
        line |= {"seconds": round(seconds, 1), "detail": detail}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Group:
    """A group of checks that runs in its own process.

    Args:
        targets: "module:function", in turn.
        arguments: of the functions, before their `Checks`.
    """

    targets: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def functions(self) -> Iterator[Any]:
        """Import the functions."""
        for target in self.targets:
            module, _, name = target.partition(":")
            yield getattr(import_module(module), name)

    def run(self, checks: Checks) -> None:
        """Run the checks of the group."""
        for function in self.functions():
            function(*self.arguments, checks)


def _ours(target: str, *arguments: str, **environment: str) -> Group:
    return Group((f"{__package__}.{target}",), arguments, environment)


# The groups that take longest come first.
GROUPS = {
    "flash": _ours("engines:check_backend", "FLASH_ATTN"),
    "triton": _ours("engines:check_backend", "TRITON_ATTN", **IEEE),
    "llama-3.1-8b": _ours("engines:check_shape", "llama-3.1-8b"),
    "kernels": _ours("kernels:check_all"),
    "pytest": _ours("runner:check_pytest"),
    "oracles": _ours("oracles:check_on_gpu", **IEEE),
    "qwen3-8b": _ours("engines:check_shape", "qwen3-8b"),
    "syncs": _ours("syncs:check_on_gpu"),
    "attention": Group(
        (
            "support.attention.oracles:check_on_gpu",
            "support.attention.folded_oracles:check_on_gpu",
        )
    ),
    "flashinfer": _ours("engines:check_flashinfer"),
    "words": _ours("features:check_words", **IEEE),
    "runner": _ours("engines:check_runner", **IEEE, VLLM_USE_V2_MODEL_RUNNER="0"),
    **{
        name: _ours("features:check_trial", name, **IEEE)
        for name in ("fp8", "windows", "heads", "sinks", "ngram")
    },
}


def check_pytest(checks: Checks) -> None:
    """Run the tests of tests/gpu, where pytest is installed."""
    with checks.case("tests/gpu") as notes:
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / TESTS / "gpu")]
        try:
            import pytest  # noqa: F401
        except ImportError:
            notes.append("NOT RUN: pytest is not installed")
            return
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        notes.append(done.stdout.strip().splitlines()[-1])
        assert done.returncode == 0, "pytest failed"


def import_all(names: Sequence[str]) -> bool:
    """Import the functions of groups; this is what can be tried without a GPU."""
    sys.path.insert(0, str(ROOT / TESTS))
    for name in names:
        found = [function.__qualname__ for function in GROUPS[name].functions()]
        print(f"{name}: would run {', '.join(found)}")
    return True


def environment() -> dict[str, str]:
    """Return the environment of a group's process, which imports tests/support."""
    folders = os.environ.get("PYTHONPATH"), str(ROOT / TESTS)
    path = os.pathsep.join(filter(None, folders))
    threads = {"OMP_NUM_THREADS": "4"}  # groups share the cores
    return {**os.environ, **ENVIRONMENT, **threads, "PYTHONPATH": path}


def run_group(command: Sequence[str], path: Path, end: float, name: str) -> None:
    """Run a group in its own process, which adds its checks to a file.

    Args:
        command: runs a group; gets its name and the file.
        path: the file; gets a line too where the group ended too early.
    """
    started = time.monotonic()
    problem = None
    if started >= end:
        problem = "not begun: out of time"
    else:
        words = [*command, name, str(path)]
        try:
            status = subprocess.run(
                words, cwd=ROOT, env=environment(), timeout=end - started
            ).returncode
        except subprocess.TimeoutExpired:
            problem = f"cut off after {time.monotonic() - started:.0f} s"
        else:
            problem = f"its process ended with status {status}" if status else None
    if problem is None and not any(line["group"] == name for line in lines_of(path)):
        problem = "it checked nothing"
    if problem is not None:
        seconds = time.monotonic() - started
        Checks(name, path).add("the whole group", False, seconds, problem)


def runs_in(path: Path) -> list[list[Line]]:
    """Return the checks of each run in a file; a run begins with its machine."""
    found: list[list[Line]] = [[]]
    for line in map(json.loads, path.read_text().splitlines()):
        if "machine" in line:
            found.append([])
        else:
            found[-1].append(line)
    return found


def lines_of(path: Path) -> list[Line]:
    """Return the checks of the last run in a file."""
    return runs_in(path)[-1]


def last_runs(path: Path) -> dict[str, list[Line]]:
    """Return the checks of each group, from the last run that had it."""
    found: dict[str, list[Line]] = {}
    for run in runs_in(path):
        for group in dict.fromkeys(line["group"] for line in run):
            found[group] = [line for line in run if line["group"] == group]
    return found


def run_all(
    names: Sequence[str],
    seconds: float,
    path: Path,
    command: Sequence[str] = COMMAND,
    jobs: int = JOBS,
) -> bool:
    """Run groups, a few at a time; print all checks, return whether all passed.

    Args:
        seconds: for everything; a group may use the time that is left.
        path: to append to: a line about the machine, one for each check as it ends.
    """
    started = time.monotonic()
    about = machine()
    with path.open("a") as file:
        file.write(json.dumps({"machine": about}) + "\n")
    run = partial(run_group, command, path, started + seconds - GRACE_SECONDS)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        list(pool.map(run, names))
    lines = sorted(lines_of(path), key=lambda line: names.index(line["group"]))
    words = [about.get(key) for key in ("gpu", "torch", "vllm", "triton")]
    failed = sum(not line["ok"] for line in lines)
    rows = [
        [
            "ok" if line["ok"] else "FAIL",
            line["group"],
            line["check"],
            f"{line['seconds']:.1f}",
            line["detail"][:MAX_DETAIL],
        ]
        for line in lines
    ]
    header = ["", "group", "check", "seconds", "notes"]
    print(f"\n{' '.join(map(str, words))}\n\n{table(header, rows)}\n")
    print(
        f"{len(lines) - failed} checks passed, {failed} failed, "
        f"{time.monotonic() - started:.0f} s"
    )
    return not failed
