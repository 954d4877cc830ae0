"""Compares what tests did in each mode with what they do in stock vLLM."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.vllm_tests import MODES, STOCK
from tools.vllm_tests.record import FAILED, PASSED, SKIPPED, Record

Records = Mapping[str, Mapping[str, Record]]
"""By mode, the records of tests by name."""


@dataclass(frozen=True)
class Expected:
    """Tests that pass in stock vLLM and not with our classes; in `stock`, that fail.

    Args:
        reason: one sentence; or, where `refused`, the row of `api.guards`.
        modes: in which they differ.
        tests: a file and a function, which stand for all parameters of the function, or
            one parameter's name.
        refused: the configuration is one that nobody can serve.
    """

    reason: str
    modes: Sequence[str]
    tests: Sequence[str]
    refused: bool = False

    def covers(self, mode: str, test: str) -> str | None:
        """Return the entry that covers a test, None without one."""
        test = test.removeprefix("tests/v1/")
        names = (test, test.partition("[")[0]) if mode in self.modes else ()
        return next((name for name in names if name in self.tests), None)


def table(records: Records) -> list[str]:
    """Return how many tests of each file passed, failed and were skipped, by mode."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for mode, tests in records.items():
        for record in tests.values():
            for file in (record.test.partition("::")[0], "together"):
                counts.setdefault(file, Counter())[mode, record.outcome] += 1
    lines = ["passed, failed, skipped".ljust(62) + "".join(f"{m:>16}" for m in records)]
    for file, row in sorted(counts.items()):
        cells = [
            f"{row[m, PASSED]:8}{row[m, FAILED]:4}{row[m, SKIPPED]:4}" for m in records
        ]
        lines.append(file.ljust(62) + "".join(cells))
    for mode, tests in records.items():
        used = sum(record.ours > 0 for record in tests.values())
        events = sum(record.events for record in tests.values())
        lines.append(f"{mode}: {used} tests build objects of ours, {events:,} events")
    return lines


def problems(records: Records, expected: Iterable[Expected]) -> list[str]:
    """Return what differs unexpectedly, and what is expected and does not differ.

    Args:
        records: of STOCK and other modes.
    """
    found, seen = [], set()
    rows = list(expected)
    for mode in records:
        for record in differences(records, mode):
            covers = [(row, row.covers(mode, record.test)) for row in rows]
            covers = [(row, name) for row, name in covers if name]
            seen |= {(mode, name) for _, name in covers}
            refusals = {row.reason for row, _ in covers if row.refused}
            if not covers:
                found.append(f"{mode}: {record.test}: {record.message}")
            elif not refusals <= {*record.refused}:
                found.append(f"{mode}: {record.test}: not refused as {refusals}")
    ran = {test.partition("::")[0].removeprefix("tests/v1/") for test in records[STOCK]}
    listed = {
        (mode, name)
        for row in rows
        for mode in row.modes
        for name in row.tests
        if name.partition("::")[0] in ran
    }
    found += [
        f"{mode}: {name} differs no longer: take it off the list"
        for mode, name in sorted(listed - seen)
        if mode in records
    ]
    return found + _vacuous(records)


def differences(records: Records, mode: str) -> list[Record]:
    """Return records of tests that pass in STOCK alone; of STOCK those that fail."""
    stock, own = records[STOCK], records[mode]
    if mode == STOCK:
        return [record for record in stock.values() if record.outcome == FAILED]
    passed = [test for test, record in stock.items() if record.outcome == PASSED]
    found = [own.get(test, Record(test, FAILED, "did not run")) for test in passed]
    return [record for record in found if record.outcome != PASSED]


def _vacuous(records: Records) -> list[str]:
    """Return modes that have tried nothing of ours."""
    found = []
    for mode in records.keys() - {STOCK}:
        tests = records[mode].values()
        if not any(record.ours for record in tests):
            found.append(f"{mode}: no test built an object of ours")
        num_events = sum(record.events for record in tests)
        if bool(num_events) != ("interval" in MODES[mode]):
            found.append(f"{mode}: did not expect {num_events} events")
    return found
