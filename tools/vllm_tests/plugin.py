"""A pytest plugin that has vLLM's tests build our classes where they name vLLM's.

    pytest -p tools.vllm_tests.plugin --kv-log LOG --kv-mode small FILE...

It rebinds names in test modules. A test fails, too, where a scheduler that it has built
holds on to something for requests that have gone.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tools.vllm_tests import MODES, STOCK, leaks
from tools.vllm_tests.record import FAILED, PASSED, Record
from tools.vllm_tests.swaps import Swaps


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    parser.addoption("--kv-mode", choices=MODES)
    parser.addoption("--kv-log", type=Path, help="gets a record per test")


def pytest_configure(config: pytest.Config) -> None:
    """Start the plugin."""
    mode, log = config.getoption("kv_mode"), config.getoption("kv_log")
    swaps = None if mode == STOCK else Swaps(MODES[mode])
    config.pluginmanager.register(Plugin(swaps, log))


class Plugin:
    """Runs one session of pytest in one mode; writes its records."""

    def __init__(self, swaps: Swaps | None, log: Path) -> None:
        self.swaps, self.log = swaps, log
        self.record = Record("")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put ours in place; leave out a clean-up that is for GPUs and takes long."""
        for item in items:
            item.add_marker("skip_global_cleanup")
        if self.swaps is None:
            return
        self.swaps.run()
        self.swaps.serve(import_module("tests.utils").RemoteOpenAIServer)
        for name in [name for name in sys.modules if name.startswith("tests.")]:
            module = vars(sys.modules[name])
            for key, value in list(module.items()):
                if isinstance(value, type) and value in self.swaps.classes:
                    module[key] = self.swaps.classes[value]

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
        swaps = self.swaps
        try:
            result = yield
            schedulers = [*swaps.schedulers, *swaps.engines] if swaps else []
            found = [leak for each in schedulers for leak in leaks.find(each)]
            if found:
                pytest.fail(f"leaks: {found}", pytrace=False)
            return result
        finally:
            if swaps:
                self.record.events += swaps.close()  # a fixture may have ended servers

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test went."""
        record = self.record
        if record.outcome == FAILED:  # by a part of it, or in its call
            return
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            record.outcome = report.outcome
            record.message = crash.message if crash else str(report.longrepr)
        elif report.when == "call":
            record.outcome = PASSED
