"""Owns engines in processes of their own, which take turns.

Each engine has its process, so that stock vLLM is as it is without this package, and an
engine that fails takes nothing with it.
"""

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.gpu.engine import ENVIRONMENT, BenchEngine, EngineSpec
from benchmarks.gpu.parts import Options
from benchmarks.gpu.record import Record

START_SECONDS = 300.0
FASTEST_START_SECONDS = 30.0
CALL_SECONDS = 590.0
STOP_SECONDS = 20.0
RESERVED_BYTES = 2**30


class EngineError(Exception):
    """An engine's process failed; the message is its traceback."""


class EngineProcess:
    """An engine in a process of its own.

    Args:
        spec: what to start; starting goes on while other engines start.
    """

    def __init__(self, spec: EngineSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self.spec = spec
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, theirs))
        self._process.start()
        theirs.close()

    def wait_ready(self) -> dict[str, Any]:
        """Return `BenchEngine.describe` once the engine has started."""
        return self._answer(START_SECONDS)

    def call(self, method: str, **arguments: Any) -> Any:
        """Return what a method of BenchEngine returns.

        Raises:
            EngineError: it raised, or its process ended.
        """
        self._pipe.send((method, arguments))
        return self._answer(CALL_SECONDS)

    def _answer(self, seconds: float) -> Any:
        name = self.spec.name
        try:
            if not self._pipe.poll(seconds):
                raise EngineError(f"{name}: no answer within {seconds:.0f} s")
            is_good, value = self._pipe.recv()
        except EOFError:
            self._process.join(STOP_SECONDS)
            code = self._process.exitcode
            raise EngineError(f"{name}: its process ended, status {code}") from None
        if not is_good:
            raise EngineError(f"{name}: {value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(spec: EngineSpec, pipe: Any) -> None:
    """Start an engine and carry out calls until the other end is closed."""
    os.environ.update(ENVIRONMENT)
    try:
        engine = BenchEngine(spec)
        pipe.send((True, engine.describe()))
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                break
            pipe.send((True, getattr(engine, method)(**arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    engine.close()


@contextmanager
def running(specs: Sequence[EngineSpec]) -> Iterator[dict[str, EngineProcess]]:
    """Start engines side by side; yield them by name."""
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for spec in specs:
            engines[spec.name] = EngineProcess(spec)
            stack.callback(engines[spec.name].close)
        yield engines


def groups_that_fit(
    specs: Sequence[EngineSpec], card_bytes: int | None
) -> list[list[EngineSpec]]:
    """Return engines in groups that the GPU has memory for, in order.

    Args:
        card_bytes: of the GPU; without one (None) they are one group.
    """
    if card_bytes is None:
        return [list(specs)]
    room = card_bytes - RESERVED_BYTES
    found: list[list[EngineSpec]] = []
    for spec in specs:
        taken = sum(each.needed_bytes for each in found[-1]) if found else room
        if taken + spec.needed_bytes <= room:
            found[-1].append(spec)
        else:
            found.append([spec])
    return found


@dataclass(frozen=True)
class Cell:
    """One measurement of one engine.

    Args:
        method: of BenchEngine.
        name: of the measurement; a warm-up has none.
    """

    engine: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def take_turns(
    record: Record,
    options: Options,
    specs: Sequence[EngineSpec],
    warm_ups: Sequence[Cell],
    cells: Sequence[Cell],
    limit_s: float,
) -> None:
    """Start engines, as many at once as fit, warm them up, and measure cell by cell.

    Args:
        record: gets each cell that it lacks, with what its engine is.
        warm_ups: asked of an engine before its first cell.
        limit_s: the most seconds of one whose arguments do not say it.
    """
    for group in groups_that_fit(specs, options.card_bytes):
        alive = {spec.name for spec in group}
        mine = [cell for cell in cells if cell.engine in alive]
        wanted = {cell.engine for cell in mine if cell.name not in record.cells}
        if not (wanted and options.has_time(FASTEST_START_SECONDS + limit_s)):
            continue
        with running([spec for spec in group if spec.name in wanted]) as engines:
            facts = {name: engine.wait_ready() for name, engine in engines.items()}
            for cell in warm_ups:
                if cell.engine in wanted:
                    ask(engines, facts, cell)
            for cell in (cell for cell in mine if cell.engine in wanted):
                call = partial(ask, engines, facts, cell)
                limit = cell.arguments.get("limit_s", limit_s)
                options.measure(record, cell.name, limit, call)


def ask(
    engines: Mapping[str, EngineProcess], facts: Mapping[str, Any], cell: Cell
) -> dict[str, Any]:
    """Return what an engine measured, and what the engine is."""
    found = engines[cell.engine].call(cell.method, **cell.arguments)
    return found | {"engine": facts[cell.engine]}
