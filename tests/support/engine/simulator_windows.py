"""Layers with a sliding window in the simulation: what they hold and what they read.

Their keys and values depend on all tokens before and, behind a request's first event,
on what its layers of full attention have kept, which no other request shares.
"""

from typing import Any

import numpy as np

from support.engine.simulator_cache import managers_of
from support.engine.simulator_engine import Scenario
from support.engine.simulator_pages import STRIDE, Incarnation, check, own_pages
from support.engine.simulator_worker import StorageWorker


class WindowCheck:
    """The groups with a window of one engine, on the storage of the other group."""

    def __init__(
        self, scheduler: Any, scenario: Scenario, worker: StorageWorker
    ) -> None:
        self.managers = managers_of(scheduler)[1:]
        self.window, self.size = scenario.window_tokens, scenario.block_size
        self.worker = worker
        # By request, a row of superblocks for each group.
        self._rows: dict[str, list[list[int]]] = {}

    def owned(self) -> list[int]:
        """Return the ids of what requests hold, once for each that holds it."""
        return [
            block.block_id
            for manager in self.managers
            for row in manager.req_to_blocks.values()
            for block in row
            if not block.is_null
        ]

    def execute(self, output: Any) -> None:
        """Write the tokens of a step, then check all that their windows show."""
        if not self.managers:
            return
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._rows.pop(name, None)
        self._update_rows(output)
        spans = []
        for name, count in output.num_scheduled_tokens.items():
            state = self.worker.live[name]
            spans.append((name, state, state.computed - count, state.computed))
        for name, state, start, end in spans:
            for slots in self._slots(name, start, end):
                self.worker.tokens[slots] = self._codes(state, start, end)
        for name, state, start, end in spans:
            first = max(start - self.window + 1, 0)
            expected = self._codes(state, first, end)
            for slots in self._slots(name, first, end):
                found = self.worker.tokens[slots]
                wrong = (found != expected).any(0)
                check(not wrong.any(), name, "window of strangers", first, end, wrong)

    def _update_rows(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = [list(ids) for ids in new.block_ids[1:]]
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._rows[name] = [[] for _ in self.managers]
            for row, more in zip(self._rows[name], (ids or ())[1:], strict=False):
                row.extend(more)

    def _slots(self, name: str, start: int, end: int) -> list[np.ndarray]:
        """Return [heads, tokens] slots of some positions, for each group."""
        position, found = np.arange(start, end), []
        for row in self._rows[name]:
            check(len(row) * self.size >= end, name, "no room in a window for", end)
            blocks = np.array(row)[position // self.size]
            check(blocks.all(), name, "attends the null block in a window")
            found.append(own_pages(blocks) * self.size + position % self.size)
        return found

    def _codes(self, state: Incarnation, start: int, end: int) -> np.ndarray:
        position = np.arange(start, end)
        plan, own = state.asked.plan, -(state.number * STRIDE) - position
        first_event = end if plan is None else plan.next_event(1)
        if state.asked.is_called:
            first_event = state.positions[0] if state.positions else end
        return np.where(position < first_event, state.codes(position), own)
