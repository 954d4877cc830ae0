"""Seconds per test file: `make test ARGS="--tally seconds.txt"`."""

import os
import time
from collections import defaultdict
from pathlib import Path

import pytest


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Tally:
    """Sums wall and CPU seconds by test file, in whichever process a test runs.

    A process that outlives its test, such as a server that a file shares, counts where
    it ends. Seconds of CPU hardly depend on what else the machine does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = (time.perf_counter(), cpu_seconds())
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self.before = (time.perf_counter(), cpu_seconds())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        """Give a report what its phase took, which travels to the first process."""
        report = yield
        now = (time.perf_counter(), cpu_seconds())
        report.tally = (now[0] - self.before[0], now[1] - self.before[1])
        self.before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test, in the process that the user started."""
        sums = self.sums[report.location[0]]
        sums[0] += report.tally[0]
        sums[1] += report.tally[1]
        sums[2] += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        """Write a line per file, the dearest first: wall, CPU, tests, file."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            return
        rows = sorted(self.sums.items(), key=lambda row: -row[1][1])
        lines = [f"{w:8.1f} {c:8.1f} {n:5d} {name}" for name, (w, c, n) in rows]
        total = [sum(row[k] for row in self.sums.values()) for k in range(3)]
        lines.append(f"{total[0]:8.1f} {total[1]:8.1f} {total[2]:5.0f} in all")
        self.path.write_text("    wall      cpu tests file\n" + "\n".join(lines) + "\n")
