"""Owns the clocks: spans on a device's own time line, and how fast its memory is."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.worker.compaction import Compactor

PHASES: dict[str, tuple[str, ...]] = {
    "usage": ("window_usage", "pooled_usage"),
    "score": (
        "paged_norms",
        "paged_cosines",
        "paged_projections",
        "paged_pair_projections",
        "paged_quadratics",
        "paged_gates",
    ),
    "select": (
        "credited_mass",
        "segment_quota",
        "pick_by_quota",
        "fill_next_best",
        "top_k_mask",
        "resize",
        "limit_must_keep",
    ),
    "compact": ("compact_pages", "list_survivors", "survivor_moves"),
    "tables": ("page_tables", "head_page_tables"),
}
"""What the time of events and of page tables is for: the operations that it counts."""
EVENT = "event"
COPY_BYTES = {"cuda": 2**32, "cpu": 2**22}


class Spans:
    """Spans of time by name; the device is not waited for until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what is launched inside."""
        start = self._mark()
        yield
        self._marks[name].append((start, self._mark()))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def milliseconds(self) -> dict[str, list[float]]:
        """Return the spans so far, in order, and forget them; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        marks, self._marks = self._marks, defaultdict(list)
        return {
            name: [_between(start, end) for start, end in pairs]
            for name, pairs in marks.items()
        }


def _between(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


@contextmanager
def watched(spans: Spans) -> Iterator[None]:
    """Time every operation, and every step's events, while inside.

    What a captured graph replays is not seen: no Python runs then.

    Args:
        spans: gets spans named by operations, and `EVENT` around a step's events; an
            operation inside another one belongs to that.
    """
    call, run = Operation.__call__, Compactor.run
    inside: list[str] = []

    def timed_call(self: Operation, *args: Any, **kwargs: Any) -> Any:
        if inside:
            return call(self, *args, **kwargs)
        inside.append(self.name)
        try:
            with spans.span(self.name):
                return call(self, *args, **kwargs)
        finally:
            inside.pop()

    def timed_run(self: Compactor, *args: Any, **kwargs: Any) -> Any:
        with spans.span(EVENT):
            return run(self, *args, **kwargs)

    Operation.__call__, Compactor.run = timed_call, timed_run
    try:
        yield
    finally:
        Operation.__call__, Compactor.run = call, run


def median_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of one call, after three that do not count.

    On a GPU each call finds the L2 cache cold, as Triton's `do_bench` sees to.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=10, rep=repeats, return_mode="median")
    spans = Spans(device)
    for _ in range(repeats + 3):
        with spans.span("call"):
            call()
    return statistics.median(spans.milliseconds()["call"][3:])


def copy_bytes_per_second(device: torch.device) -> float:
    """Return the speed of a large copy on the device, bytes read and written."""
    size = COPY_BYTES[device.type]
    source = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    milliseconds = median_ms(lambda: target.copy_(source), device, 100)
    return 2 * size / (1e-3 * milliseconds)
