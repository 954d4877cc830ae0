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

PHASES = {
    "window_usage": "usage",
    "paged_norms": "score",
    "paged_cosines": "score",
    "paged_projections": "score",
    "paged_pair_projections": "score",
    "paged_quadratics": "score",
    "credited_mass": "select",
    "pooled_usage": "usage",
    "segment_quota": "select",
    "pick_by_quota": "select",
    "fill_next_best": "select",
    "top_k_mask": "select",
    "resize": "select",
    "compact_pages": "compact",
    "assign_pages": "assign",
    "page_quota": "assign",
    "count_in_pages": "assign",
    "enter_page_lists": "enter",
    "enter_requests": "enter",
    "limit_must_keep": "select",
    "list_survivors": "compact",
    "survivor_moves": "compact",
    "must_keep_tokens": "open",
    "read_survivors": "remember",
    "write_survivors": "remember",
    "page_tables": "tables",
    "head_page_tables": "tables",
    "save_rows": "queries",
    "until_attention": "attention",
    "paged_gates": "score",
    "page_bounds": "pages",
    "page_scores": "pages",
    "best_pages": "pages",
    "write_until": "pages",
}
"""Operation -> what an event or a step spends its time on."""
EVENT = "event"
COPY_BYTES = {"cuda": 2**32, "cpu": 2**22}


class Spans:
    """Spans of time by name; the device is not waited for until they are read.

    Args:
        device: whose time line it is.
    """

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
    """Time every operation by its phase, and every step's events, while inside.

    What a captured graph replays is not seen: no Python runs then.

    Args:
        spans: gets spans named by `PHASES`, and `EVENT` around a step's events; an
            operation inside another one belongs to that.
    """
    call, run = Operation.__call__, Compactor.run
    inside: list[str] = []

    def timed_call(self: Operation, *args: Any, **kwargs: Any) -> Any:
        if inside:
            return call(self, *args, **kwargs)
        inside.append(self.name)
        try:
            with spans.span(PHASES[self.name]):
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
