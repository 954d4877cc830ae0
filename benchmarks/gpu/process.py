"""Owns engines in processes of their own, which the parts call in turn.

Each engine has its process, so that stock vLLM is as it is without this package, and an
engine that fails takes nothing with it.
"""

import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from benchmarks.gpu.engine import ENVIRONMENT, BenchEngine, EngineSpec
from benchmarks.gpu.rehearsal import RehearsedProcess

START_SECONDS = 300.0
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
        for method, arguments in iter(partial(_next_call, pipe), None):
            pipe.send((True, getattr(engine, method)(**arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    engine.close()


def _next_call(pipe: Any) -> tuple[str, dict[str, Any]] | None:
    """Return a method and its arguments, None once the other end is closed."""
    try:
        return pipe.recv()
    except EOFError:
        return None


@contextmanager
def running(specs: Sequence[EngineSpec]) -> Iterator[dict[str, EngineProcess]]:
    """Start engines side by side; yield them by name, all ready."""
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for spec in specs:
            kind: Any = RehearsedProcess if spec.is_rehearsal else EngineProcess
            engines[spec.name] = kind(spec)
            stack.callback(engines[spec.name].close)
        yield engines


def groups_that_fit(
    specs: Sequence[EngineSpec], card_bytes: int | None
) -> list[list[EngineSpec]]:
    """Return engines in groups that the GPU has memory for, in order.

    Args:
        specs: of the engines.
        card_bytes: of the GPU; without one (None) they are one group.
    """
    if card_bytes is None:
        return [list(specs)]
    room = card_bytes - RESERVED_BYTES
    found: list[list[EngineSpec]] = []
    for spec in specs:
        group = found[-1] if found else []
        taken = sum(each.needed_bytes for each in group)
        if group and taken + spec.needed_bytes <= room:
            group.append(spec)
        else:
            found.append([spec])
    return found


def describe(engines: Mapping[str, EngineProcess]) -> dict[str, dict[str, Any]]:
    """Wait until engines have started; return what vLLM made of their arguments."""
    return {name: engine.wait_ready() for name, engine in engines.items()}
