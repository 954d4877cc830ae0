"""Owns what parts have in common: options, cells within a time limit, verdicts."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.record import Record

TINY = "tiny"
REHEARSED_CARD = 80 * 2**30
"""Bytes of the GPU of a rehearsal: the smaller of those that are in use."""
START_SECONDS = 30.0
"""That engines take to start, at least."""


@dataclass
class Options:
    """What the command was asked for.

    Args:
        model: one of models.SHAPES; `tiny` goes with sizes that a CPU can do.
        folder: for model folders.
        seconds: after which nothing new is begun.
        settings: further arguments of vLLM's LLM, for all engines.
        is_rehearsal: engines only seem to run, on a card that is not there.

    Attributes:
        left: measurements for which there was no time.
    """

    model: str
    folder: Path
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_rehearsal: bool = False
    left: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def is_tiny(self) -> bool:
        """Whether this only tries the measurement out."""
        return self.model == TINY

    @property
    def card_bytes(self) -> int | None:
        """Bytes of the GPU, None without one."""
        if self.is_rehearsal:
            return REHEARSED_CARD
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(0).total_memory

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def engine(self, name: str, pool_tokens: int, **fields: Any) -> EngineSpec:
        """Return what to start; see EngineSpec."""
        settings = {**self.settings, **fields.pop("settings", {})}
        fields |= {"settings": settings, "is_rehearsal": self.is_rehearsal}
        return EngineSpec(name, self.model, self.folder, pool_tokens, **fields)

    def has_time(self, names: Sequence[str], limit_s: float) -> bool:
        """Return whether engines can start and measure once; else note what is left.

        Args:
            names: of the measurements.
            limit_s: the most seconds that one of them may take.
        """
        if self.elapsed + START_SECONDS + limit_s <= self.seconds:
            return True
        self.left += names
        return False

    def measure(
        self, record: Record, name: str, limit_s: float, call: Callable[[], Any]
    ) -> None:
        """Measure what the record lacks, if there is time for it.

        Args:
            record: gets it.
            name: of the measurement.
            limit_s: the most seconds that it may take.
            call: returns it.
        """
        if name in record.cells:
            return
        if self.elapsed + limit_s > self.seconds:
            self.left.append(name)
            return
        started = self.elapsed
        record.add(name, call())
        log(f"{self.elapsed:5.0f} s  {name}: {self.elapsed - started:.1f} s")


@dataclass(frozen=True)
class Verdict:
    """A number beside its target.

    Args:
        name: what it is.
        value: the number.
        target: what it should be.
        at_most: the target is an upper limit.
    """

    name: str
    value: float
    target: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the number is good enough."""
        return (
            (self.value <= self.target) if self.at_most else self.value >= self.target
        )

    def row(self) -> list[str]:
        """Return a line of a table."""
        sign = "<=" if self.at_most else ">="
        met = "met" if self.is_met else "MISSED"
        return [self.name, f"{self.value:.3f}", f"{sign} {self.target:g}", met]


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Args:
        summary: half a line for the help text.
        run: measures what the record lacks.
        names: of all measurements, in the order in which they are made.
        table: header and lines of what was measured.
        verdicts: numbers with targets.
        has_engines: it starts some; a rehearsal takes its real sizes.
    """

    summary: str
    run: Callable[[Record, Options], None]
    names: Callable[[Options], Sequence[str]]
    table: Callable[[Record, Options], tuple[Sequence[str], list[list[str]]]]
    verdicts: Callable[[Record, Options], list[Verdict]]
    has_engines: bool = False


def log(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)
