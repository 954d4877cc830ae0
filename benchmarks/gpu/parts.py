"""Owns what parts have in common: options, time limits, verdicts, one record each."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.record import Record
from benchmarks.gpu.timing import copy_bytes_per_second
from benchmarks.printing import log

TINY = "tiny"
COPY, COPY_LIMIT_S = "copy", 10.0
Table = tuple[list[str], list[list[str]]]
"""Header and lines."""


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Args:
        model: one of models.SHAPES; `tiny` goes with sizes that a CPU can do.
        seconds: after which nothing new is begun.
    """

    model: str
    folder: Path
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def is_tiny(self) -> bool:
        """Whether this only tries the measurement out."""
        return self.model == TINY

    @property
    def device(self) -> torch.device:
        """The GPU where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def card_bytes(self) -> int | None:
        """Bytes of the GPU, None without one."""
        if not torch.cuda.is_available():
            return None
        return torch.cuda.get_device_properties(0).total_memory

    def engine(self, name: str, pool_tokens: int, **fields: Any) -> EngineSpec:
        """Return what to start; see EngineSpec."""
        return EngineSpec(name, self.model, self.folder, pool_tokens, **fields)

    def has_time(self, limit_s: float) -> bool:
        """Return whether something that may take so many seconds can begin."""
        return time.monotonic() - self.started + limit_s <= self.seconds

    def measure(
        self, record: Record, name: str, limit_s: float, call: Callable[[], Any]
    ) -> None:
        """Measure what the record lacks, if there is time for it.

        Args:
            limit_s: the most seconds that it may take.
        """
        if name in record.cells or not self.has_time(limit_s):
            return
        begun = time.monotonic()
        record.add(name, call())
        ended = time.monotonic()
        log(f"{ended - self.started:5.0f} s  {name}: {ended - begun:.1f} s")


def measure_copy(record: Record, options: Options) -> None:
    """Measure COPY, the bytes per second of a large copy, and give its memory back."""

    def copy() -> dict[str, float]:
        speed = copy_bytes_per_second(options.device)
        torch.cuda.empty_cache()
        return {"bytes_per_second": speed}

    options.measure(record, COPY, COPY_LIMIT_S, copy)


@dataclass(frozen=True)
class Verdict:
    """A number beside its target."""

    name: str
    value: float
    target: float
    at_most: bool = False

    def row(self) -> list[str]:
        """Return a line of a table."""
        sign = "<=" if self.at_most else ">="
        margin = self.target - self.value if self.at_most else self.value - self.target
        met = "met" if margin >= 0 else "MISSED"
        return [self.name, f"{self.value:.3f}", f"{sign} {self.target:g}", met]


class Part(ABC):
    """One part of the benchmark: what it measures is in its fields."""

    @abstractmethod
    def tiny(self) -> "Part":
        """Return one of the same form that a CPU can do."""

    @abstractmethod
    def names(self, options: Options) -> list[str]:
        """Return the names of all measurements, in the order in which they are made."""

    @abstractmethod
    def run(self, record: Record, options: Options) -> None:
        """Measure what the record lacks."""

    @abstractmethod
    def table(self, record: Record, options: Options) -> Table:
        """Return header and lines of what was measured."""

    def verdicts(self, record: Record, options: Options) -> list[Verdict]:
        """Return the numbers that have targets."""
        return []
