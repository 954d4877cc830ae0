"""A pytest plugin that has vLLM's tests build our classes where they name vLLM's.

    pytest -p tools.vllm_tests.plugin --kv-records FOLDER --kv-modes stock,small FILE...

Imports the tests once and runs them in each mode in a process of its own. It rebinds
names in test modules; nothing of vLLM is changed. A test fails, too, where a scheduler
that it has built holds on to something for requests that have gone.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.vllm_tests import MODES, STOCK, leaks
from tools.vllm_tests.record import FAILED, PASSED, Record
from tools.vllm_tests.swaps import Swaps


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    parser.addoption("--kv-modes", type=_modes, help="names, comma-separated")
    parser.addoption("--kv-records", type=Path, help="folder of MODE.jsonl")


def pytest_configure(config: pytest.Config) -> None:
    """Start the plugin."""
    modes, records = config.getoption("kv_modes"), config.getoption("kv_records")
    config.pluginmanager.register(Plugin(modes, records))


class Plugin:
    """Runs one session of pytest in several modes; writes their records."""

    def __init__(self, modes: list[str], records: Path) -> None:
        self.modes, self.records = modes, records
        self.swaps: Swaps | None = None
        self.record, self.log = Record(""), records

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out a clean-up after each test that is for GPUs and takes a second."""
        for item in items:
            item.add_marker("skip_global_cleanup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Go on to the tests in a process per mode; wait for each."""
        if session.testsfailed:  # a file cannot be imported
            return None
        for mode in self.modes:
            sys.stdout.flush()
            child = os.fork()
            if not child:
                self._start(mode)
                return None
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise session.Failed(f"mode {mode} ended with status {status}")
        return True

    def _start(self, mode: str) -> None:
        self.log = self.records / f"{mode}.jsonl"
        self.log.write_text("")
        if mode == STOCK:
            return
        self.swaps = Swaps(MODES[mode])
        self.swaps.serve()
        for test_module in [name for name in sys.modules if name.startswith("tests.")]:
            module = sys.modules[test_module]
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in self.swaps.classes:
                    setattr(module, name, self.swaps.classes[value])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Write the record of a test."""
        self.record = Record(item.nodeid)
        if self.swaps:
            self.swaps.record = self.record
        result = yield
        self.record.write(self.log)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Look at what the schedulers of a test hold when it has passed."""
        schedulers = self.swaps.schedulers if self.swaps else []
        try:
            result = yield
            found = [leak for each in schedulers for leak in leaks.find(each)]
            if found:
                pytest.fail(f"leaks: {found}", pytrace=False)
            return result
        finally:
            for each in schedulers:
                self.record.events += each.kv_policy_planner.num_events
                each.kv_policy_counters.file.remove()
            schedulers.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test went."""
        record = self.record
        if record.outcome == FAILED:  # by a part of it, or in its call
            return
        if not report.passed:
            record.outcome, record.message = report.outcome, _reason(report)
        elif report.when == "call":
            record.outcome = PASSED


def _modes(names: str) -> list[str]:
    return names.split(",")


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # of a skipped test
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else report.longreprtext
