"""Owns requests that are sent to an engine at once, and when their tokens come."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.load import Completion


class Requests:
    """Requests that are sent at once, and when their tokens came.

    Args:
        bench: the BenchEngine.
        prompts: token ids.
        extra: the requests' own knobs.

    Attributes:
        completions: one per request.
        step_ms: how long each engine step took.
        running: requests in the batch after each step.
    """

    def __init__(
        self,
        bench: Any,
        prompts: Sequence[Sequence[int]],
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.bench, self.prompts, self.extra = bench, prompts, extra
        self.completions: list[Completion] = []
        self.step_ms: list[float] = []
        self.running: list[int] = []
        self._last = time.perf_counter()

    def add(self, output_tokens: int) -> None:
        """Send all requests."""
        self._last = time.perf_counter()
        for number, prompt in enumerate(self.prompts):
            self.completions.append(Completion(started=self._last))
            self.bench.send(str(number), list(prompt), output_tokens, self.extra)

    def fewest_tokens(self) -> int:
        """Return how many tokens the slowest request has."""
        return min(len(each.token_ids) for each in self.completions)

    def mean_running(self) -> float:
        """Return the requests in the batch, averaged over time."""
        return float(np.average(self.running, weights=self.step_ms))

    def step_while(self, goes_on: Callable[[], bool], limit_s: float = 600.0) -> bool:
        """Step the engine; return whether the time was enough.

        Args:
            goes_on: asked before each step; steps end with the last request, too.
            limit_s: seconds.
        """
        engine = self.bench.engine
        end = time.perf_counter() + limit_s
        while engine.has_unfinished_requests() and goes_on():
            if time.perf_counter() > end:
                return False
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                completion = self.completions[int(output.request_id)]
                tokens = output.outputs[0].token_ids
                completion.token_ids += tokens
                completion.arrivals += [now] * len(tokens)
                completion.finish_reason = output.outputs[0].finish_reason
            self.step_ms.append(1e3 * (now - self._last))
            self.running.append(len(self.bench.scheduler.running))
            self._last = now
        return True

    def abort(self) -> None:
        """End what still runs, and wait until its blocks are back."""
        left = [
            str(number)
            for number, each in enumerate(self.completions)
            if each.finish_reason is None
        ]
        if left:
            self.bench.engine.abort_request(left)
        self.bench.settle()
