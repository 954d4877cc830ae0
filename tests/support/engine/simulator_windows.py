"""Layers with a window or a state in the simulation: what they hold and what they read.

Their keys and values, or states, depend on all tokens before and, behind a request's
first event, on what its layers of full attention have kept, which no other shares.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.engine.simulator_cache import managers_of
from support.engine.simulator_engine import Scenario
from support.engine.simulator_pages import STRIDE, Incarnation, check, own_pages
from support.engine.simulator_worker import StorageWorker

Span = tuple[str, Incarnation, int, int]  # of a request: positions of a step


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
        self._run(spans)

    def _run(self, spans: Sequence[Span]) -> None:
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


class StateCheck(WindowCheck):
    """The groups of layers with a state: the first place of a page holds one.

    It stands for all tokens before, as the code of the last one does. A step reads the
    state of its first token's predecessor and leaves that of its last token.
    """

    def _run(self, spans: Sequence[Span]) -> None:
        read, left = [], []
        for name, state, start, end in spans:
            for group in range(len(self.managers)):
                if start:
                    read.append((self._slots_at(name, group, start), state, start))
                left.append((self._slots_at(name, group, end), state, end))
        overwritten = {int(slots[0]) for slots, *_ in left}
        self._check(read)
        for slots, state, end in left:
            self.worker.tokens[slots] = self._codes(state, end - 1, end)
        self._check([each for each in read if int(each[0][0]) not in overwritten])
        self._check(left)

    def _slots_at(self, name: str, group: int, end: int) -> np.ndarray:
        """Return the places of the state behind `end` tokens."""
        size = self.managers[group].block_size
        block = self._rows[name][group][(end - 1) // size]
        check(block, name, "has no state behind", end)
        return own_pages([block])[:, 0] * self.size

    def _check(self, states: Sequence[tuple[np.ndarray, Incarnation, int]]) -> None:
        for slots, state, end in states:
            is_right = self.worker.tokens[slots] == self._codes(state, end - 1, end)
            check(is_right.all(), "state of strangers", slots, end)
