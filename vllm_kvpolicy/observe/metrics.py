"""Counters that cross processes: one small file per engine.

The scheduler and the worker write it; API processes on the same host read it when they
are scraped. Each field has one writer and is one aligned 8-byte float, so values need
no lock.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any, TypeVar, cast

from vllm_kvpolicy.observe.shared_files import (
    COUNTERS,
    SharedFile,
    engines_here,
    file_path,
)
from vllm_kvpolicy.protocol import CompactEvent

logger = logging.getLogger("vllm.kv_policy")  # without importing vLLM
Method = TypeVar("Method", bound=Callable[..., None])

# What only observes, as `kvpolicy_observers_off` calls it.
TRACE, LIVE, COUNTER_FILE = "trace", "live", "counters"
# Why the scheduler calls for events: running requests grow, one waits that would fit,
# one waits that is more urgent than some that run, and one is at its ceiling.
GROWTH, ENTERING, PRIORITY, CEILING = "growth", "entering", "priority", "ceiling"
CAUSES = (GROWTH, ENTERING, PRIORITY, CEILING)


@dataclass(frozen=True)
class Series:
    """One Prometheus series: `kvpolicy_<name>`.

    Args:
        label: its own, beside those that all series have; empty for none.
        kind: "counter" or "gauge".
    """

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    kind: str = "counter"

    @property
    def fields(self) -> dict[str, tuple[str, ...]]:
        """Its values in a counter file, by name, each with the label's value if any."""
        labelled: dict[str, tuple[str, ...]]
        labelled = {f"{self.name}_{each}": (each,) for each in self.values}
        return labelled or {self.name: ()}


_gauge = partial(Series, kind="gauge")
SERIES = (
    Series("events", "Events run; each compacts one request."),
    Series("blocks_returned", "Superblocks returned to the scheduler."),
    Series("tokens_kept", "Tokens per KV head kept, summed over events."),
    Series("tokens_dropped", "Tokens per KV head dropped, summed over events."),
    Series("event_seconds", "Host seconds that the worker spent on events."),
    _gauge(
        "local_blocks",
        "Superblocks that hold local tokens, at and above the frontiers.",
    ),
    _gauge("global_blocks", "Superblocks that hold survivors."),
    _gauge("keep_ratio", "Tokens held / tokens computed, over live requests."),
    Series("steps", "Engine steps that computed tokens."),
    Series("request_steps", "Running requests, summed over engine steps."),
    Series("block_steps", "Superblocks held, summed over engine steps."),
    Series("requests", "Finished requests that had held superblocks."),
    Series("bounded_requests", "Those of them that had a bound."),
    Series(
        "uncut_requests",
        "Those with a bound that ended without an event: nothing of them was dropped.",
    ),
    Series(
        "called_events",
        "Events that were called for, by what made the pool run short.",
        "cause",
        CAUSES,
    ),
    _gauge(
        "level_tokens", "Tokens per KV head to which the last calls cut; 0 before any."
    ),
    _gauge(
        "floor_tokens",
        "The server's floor, tokens per KV head; 0 where events are not called for.",
    ),
    Series(
        "tokens_left",
        "Tokens per KV head that had left the recent window and were scored for the "
        "first time, summed over events.",
    ),
    Series(
        "peak_blocks",
        "Peak superblocks of each request, summed over finished requests.",
    ),
    Series(
        "held_back",
        "Steps in which the next waiting request could not enter, because the pool "
        "would not have borne it later.",
    ),
    Series(
        "waits", "Steps that running requests sat out so that others get to an event."
    ),
    _gauge(
        "foreseen_blocks",
        "Most superblocks that running requests with a bound will hold in a coming "
        "step.",
    ),
    Series(
        "preemptions_bounded",
        "Preemptions while all running requests had a bound: their floors did not fit "
        "together, or answers got longer than expected.",
    ),
    Series("preemptions_unbounded", "Preemptions while a request without a bound ran."),
    _gauge(
        "observers_off",
        "1 where something that only observes has failed and tells no more.",
        "observer",
        (TRACE, LIVE, COUNTER_FILE),
    ),
)
FIELDS = tuple(name for series in SERIES for name in series.fields)
INDEX = {name: index for index, name in enumerate(FIELDS)}
_VALUE = Struct("d")
SIZE_BYTES = _VALUE.size * len(FIELDS)
PERIOD_SECONDS = 0.25  # between two times that others see the scheduler's values


def counter_path(engine: str) -> Path:
    return file_path(COUNTERS, engine)


class CounterFile(SharedFile):
    """A shared array of float64, one per field, each of which one object writes.

    What tells that an observer is off is written by whoever sees it: always a 1. For
    `create` and errors see `SharedFile`.
    """

    def __init__(self, engine: str, create: bool) -> None:
        super().__init__(counter_path(engine), SIZE_BYTES, create)
        self._values = list(self.read().values())

    def add(self, name: str, amount: float) -> None:
        self.set(name, self._values[INDEX[name]] + amount)

    def set(self, name: str, value: float) -> None:
        place = INDEX[name]
        if value != self._values[place]:
            self._values[place] = value
            self.write_bytes(place * _VALUE.size, _VALUE.pack(value))

    def read(self) -> dict[str, float]:
        values = _VALUE.iter_unpack(self.read_bytes(0, SIZE_BYTES))
        return {name: value for name, (value,) in zip(FIELDS, values, strict=True)}


class EngineCounters:
    """Writes what only the scheduler knows: superblocks and tokens of requests.

    Other processes see it at every end of a request and every `PERIOD_SECONDS`. In each
    step the system calls would let other threads of Python run, and the scheduler wait
    for its turn.
    """

    def __init__(self, file: CounterFile) -> None:
        self.file = file
        self._added = Counter[str]()
        self._set: dict[str, float] = {}
        self._next = 0.0
        self.tell_ratio(())

    def add(self, **amounts: float) -> None:
        self._added.update(amounts)

    def set(self, **values: float) -> None:
        """Set gauges, and counters of what others have counted, by name."""
        self._set.update(values)

    def note_off(self, observer: str) -> None:
        self.file.set(f"observers_off_{observer}", 1)

    def is_due(self) -> bool:
        """Return whether what other processes see is old."""
        return time.monotonic() >= self._next

    def tell_ratio(self, held_and_computed: Iterable[tuple[int, int]]) -> None:
        """Let others see all values, and a new keep ratio.

        Args:
            held_and_computed: tokens of each live request.
        """
        self._next = time.monotonic() + PERIOD_SECONDS
        held = computed = 0
        for request_held, request_computed in held_and_computed:
            held += request_held
            computed += request_computed
        self.set(keep_ratio=held / computed if computed else 1.0)
        self.tell()

    def tell(self) -> None:
        for name, amount in self._added.items():
            self.file.add(name, amount)
        self._added.clear()
        for name, value in self._set.items():
            self.file.set(name, value)

    def read(self) -> dict[str, float]:
        """Return all values, those that the worker counts included."""
        self.tell()
        return self.file.read()


def only_observes(method: Method) -> Method:
    """Return a method whose errors do not reach its caller, so that serving goes on.

    The first one is logged and told to the object's `on_off`, where it has one; from
    then on the methods of that object that are wrapped like this do nothing.
    """

    @wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "is_off", False):
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.is_off = True
            name = type(self).__name__
            logger.exception("%s is off from here on; serving goes on", name)
            if hasattr(self, "on_off"):
                self.on_off()

    return cast(Method, guarded)


class WorkerCounters:
    """Writes what the worker knows: the events that it has carried out.

    The scheduler makes the file after the worker has started, so it is opened late.

    Args:
        counts: False in all ranks of a tensor-parallel group but the first: they see
            the same events, and one of them has to count.
    """

    def __init__(self, engine: str, block_size: int, counts: bool = True) -> None:
        self.engine = engine
        self.block_size = block_size
        self.counts = counts
        self._lock = Lock()

    @cached_property
    def file(self) -> CounterFile:
        return CounterFile(self.engine, create=False)

    @only_observes
    def note_off(self, observer: str) -> None:
        self.file.set(f"observers_off_{observer}", 1)

    @only_observes
    def add_events(self, count: int, seconds: float) -> None:
        """Count a step's events; on a GPU their work may outlast these host seconds."""
        if not self.counts:
            return
        self.file.add("events", count)
        self.file.add("event_seconds", seconds)

    @only_observes
    def add_tokens(self, blocks: Iterable[tuple[CompactEvent, int, int]]) -> None:
        """Count what events kept and dropped; threads may call at the same time.

        Args:
            blocks: events, each with the superblocks that were in use below its
                frontier, and those that its survivors take; in neither is what the
                scheduler has not taken back yet of an earlier one.
        """
        if not self.counts:
            return
        with self._lock:
            for event, held, count in blocks:
                local = event.local_tokens(self.block_size)
                dropped_blocks = held - count
                self.file.add("tokens_kept", count * self.block_size + local)
                self.file.add("tokens_dropped", dropped_blocks * self.block_size)
                left = len(event.leaving_blocks) * self.block_size
                self.file.add("tokens_left", left)


class Collector:
    """Prometheus collector over the counter files of a server's engines on this host.

    Registered with the registry that serves `/metrics`. Of an engine whose file cannot
    be read, there is only that it cannot: engines make theirs before a server answers.

    Args:
        model_name: label beside the engine's index, as on vLLM's own series.
        missed: names of engines whose loss has been logged; grows.
    """

    def __init__(
        self, engines: Mapping[int, str], model_name: str, missed: set[str]
    ) -> None:
        self.engines = engines
        self.model_name = model_name
        self.missed = missed

    def describe(self) -> tuple[()]:
        """Name no series, so that none is read before the engines are there."""
        return ()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        found = {index: self._read(name) for index, name in self.engines.items()}
        for series in SERIES:
            names = ("model_name", "engine", *(series.label,) * bool(series.label))
            family = families[series.kind](
                f"kvpolicy_{series.name}", series.help, labels=names
            )
            for index, values in found.items():
                own = (self.model_name, str(index))
                for field, value in series.fields.items():
                    if field in values:
                        family.add_metric((*own, *value), values[field])
            if family.samples:
                yield family

    def _read(self, name: str) -> dict[str, float]:
        """Return what an engine has counted; where its file is gone, say so once."""
        try:
            return CounterFile(name, create=False).read()
        except (OSError, ValueError):
            if name not in self.missed:
                logger.warning(
                    "cannot read %s; serving goes on without its series at /metrics",
                    counter_path(name),
                )
            self.missed.add(name)
            return {f"observers_off_{COUNTER_FILE}": 1.0}


def exposition(registry: Any, vllm_config: Any | None, missed: set[str]) -> bytes:
    """Return a page of metrics in Prometheus's text format.

    Args:
        vllm_config: of the server whose engines' counters are added; None for none.
        missed: see `Collector`.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    text = generate_latest(registry)
    if vllm_config is not None:
        counters = CollectorRegistry()
        counters.register(_collector(vllm_config, missed))
        text += generate_latest(counters)
    return text


def register(vllm_config: Any) -> None:
    """Add a server's counters to Prometheus's own registry of this process.

    It is what `vllm run-batch --enable-metrics` serves, in place of vLLM's route.
    """
    from prometheus_client import REGISTRY

    REGISTRY.register(_collector(vllm_config, set()))


def _collector(vllm_config: Any, missed: set[str]) -> Collector:
    name = vllm_config.model_config.served_model_name
    name = name[0] if isinstance(name, list) else name
    return Collector(engines_here(vllm_config), str(name), missed)
