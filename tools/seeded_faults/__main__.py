"""Judges a suite of tests by faults: a wrong line at a time, which its tests find.

    .venv/bin/python -m tools.seeded_faults                    every fault
    .venv/bin/python -m tools.seeded_faults planner triton     those of two rooms
    .venv/bin/python -m tools.seeded_faults --checkout ../old --output old.jsonl
    .venv/bin/python -m tools.seeded_faults --against old.jsonl

A run goes on where the one before has stopped. It works in a copy of the checkout.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tools.seeded_faults.faults import LIST, Copy, Fault, read_faults

HERE = Path(__file__).parents[2]
INTERPRETED = "tests/interpreted"  # in processes whose Triton interprets its kernels
SHARED = ("torch", "vllm.engine.arg_utils", "vllm.v1.core.sched.async_scheduler")
SUITE_SECONDS = 3 * 3600
FOUND, MISSED, LATE = "found", "MISSED", "time was up"


@dataclass(frozen=True)
class Verdict:
    """What a suite says of a fault.

    Args:
        result: FOUND or MISSED.
        test: that failed; otherwise what was run last said.
    """

    name: str
    digest: str
    result: str
    seconds: float
    test: str


def run_tests(copy: Copy, words: Sequence[str], limit: float) -> tuple[list[str], str]:
    """Run tests in a copy.

    Returns:
        Those that fail, and the last line; LATE where time was up.
    """
    log = copy.folder / "seeded.log"
    log.write_text("")
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setsid()
            code = _pytest(copy, words, log)
        finally:
            os._exit(code)
    done, end = 0, time.monotonic() + limit
    while not done and time.monotonic() < end:
        done, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # servers that its tests have started, too
    if not done:
        os.waitpid(child, 0)
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    names = [line.partition(" ")[2].partition(" - ")[0] for line in failed]
    return names, lines[-1] if done and lines else LATE


def _pytest(copy: Copy, words: Sequence[str], log: Path) -> int:
    """Run pytest in this process, a fork of one that has imported what is slow."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy.folder)
    words = ["-q", "-p", "no:cacheprovider", *words]
    environment = copy.environment
    if any(word.startswith(INTERPRETED) for word in words):
        environment["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "pytest", *words]
        os.execve(sys.executable, command, environment)
    os.environ.update(environment)
    sys.path[:] = [str(copy.folder), *(p for p in sys.path if p != str(HERE))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
        del sys.modules[name]
    code = pytest.main(words)
    sys.stdout.flush()
    return int(code)


def judge(copy: Copy, fault: Fault, limit: float, whole: bool) -> Verdict:
    """Run what should find a fault, which is in the copy, until something does."""
    started, result, test = time.monotonic(), MISSED, ""
    runs = [(shlex.split(words), limit) for words in fault.tests]
    if whole:
        runs.append((["tests"], SUITE_SECONDS))
    for words, seconds in runs:
        failed, test = run_tests(copy, ["-x", *words], seconds)
        if failed:
            result, test = FOUND, failed[0]
            break
    seconds = round(time.monotonic() - started, 1)
    return Verdict(fault.name, fault.digest, result, seconds, test)


def judge_all(
    copy: Copy, faults: Sequence[Fault], judge_one: Callable[[Fault], Verdict]
) -> Iterator[Verdict]:
    """Yield verdicts; what needs a build is in the copy together, so it is built once.

    Their tests have to tell such faults apart.
    """
    cpp = [fault for fault in faults if fault.is_cpp]
    for fault in faults:
        if not fault.is_cpp:
            with copy.seeded([fault]):
                yield judge_one(fault)
    if cpp:
        with copy.seeded(cpp):
            yield from map(judge_one, cpp)


def failing_anyway(copy: Copy, verdicts: Sequence[Verdict]) -> list[str]:
    """Return tests that have found faults and fail without one: they show nothing."""
    named = sorted({each.test for each in verdicts if each.result == FOUND})
    parts: tuple[list[str], list[str]] = [], []
    for test in named:
        parts[test.startswith(INTERPRETED)].append(test)
    runs = [run_tests(copy, part, SUITE_SECONDS) for part in parts if part]
    return [test for failed, _ in runs for test in failed]


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """Return the verdicts of a file by the fault's name; the last line counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {each.name: each for each in (Verdict(**json.loads(line)) for line in lines)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools.seeded_faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("names", nargs="*", help="of faults, or what names begin with (default: all)")
    add("--checkout", type=Path, default=HERE, help="whose files and tests are judged")
    add("--list", type=Path, default=LIST, help="another list of faults")
    add("--output", type=Path, default=HERE / "runs/seeded_faults.jsonl")
    add("--against", type=Path, help="output of another suite, to compare with")
    add("--limit", type=float, default=900, metavar="SECONDS", help="of each run")
    add("--all", action="store_true", help="run the whole suite where no test finds it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the faults that are not judged yet; return 1 where one is not found."""
    parser = _parser()
    given, faults = parser.parse_args(arguments), []
    for fault in read_faults(given.list):
        if not given.names or fault.name.startswith(tuple(given.names)):
            faults.append(fault)
    for name in given.names:
        if not any(fault.name.startswith(name) for fault in faults):
            parser.error(f"names: got {name!r}, with which no fault begins")
    known = read_verdicts(given.output)
    new = [f for f in faults if f.name not in known or known[f.name].digest != f.digest]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    useless: list[str] = []
    with tempfile.TemporaryDirectory() as folder, given.output.open("a") as output:
        copy, verdicts = Copy.of(given.checkout.resolve(), Path(folder)), []
        if new and (copy.folder / "vllm_kvpolicy").is_dir():
            for module in SHARED:
                import_module(module)
        for verdict in judge_all(
            copy, new, lambda fault: judge(copy, fault, given.limit, given.all)
        ):
            print(json.dumps(asdict(verdict)), file=output, flush=True)
            print(f"{verdict.result:10} {verdict.name}", file=sys.stderr, flush=True)
            verdicts.append(verdict)
        useless = failing_anyway(copy, verdicts)
    known = read_verdicts(given.output)
    mine = [known[fault.name] for fault in faults]
    for each in sorted(mine, key=lambda each: each.result != FOUND):
        print(f"{each.result:10} {each.seconds:7.1f} s  {each.name:40} {each.test}")
    missed = [each.name for each in mine if each.result != FOUND]
    print(f"{len(mine) - len(missed)} of {len(mine)} found")
    for test in useless:
        print(f"fails without a fault, so it shows nothing: {test}")
    if given.against is not None:
        other = read_verdicts(given.against)
        missed = [n for n in missed if n in other and other[n].result == FOUND]
        print(f"found by {given.against} alone: {', '.join(missed) or 'none'}")
    return 1 if missed or useless else 0


if __name__ == "__main__":
    sys.exit(main())
