"""Answers to events that reach the scheduler late, or when their request is gone."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_kvpolicy.protocol import UsedBlocks


@dataclass
class LateAnswers:
    """Answers on their way to the scheduler.

    Attributes:
        waiting: step in which each is heard, number of its incarnation, and itself.
    """

    scheduler: Any
    worker: Any
    totals: Counter[str]
    rng: random.Random
    waiting: list[tuple[int, int, UsedBlocks]] = field(default_factory=list)

    def due(self, answers: list[UsedBlocks]) -> tuple[UsedBlocks, ...]:
        """Return the answers that the scheduler hears now, some of them late.

        Args:
            answers: to the events of this step; most come within three steps more.
        """
        step = self.totals["processed"]
        self.totals["processed"] += 1
        for used in answers:
            delay = self.rng.choice((0, 0, 1, 2, 3, 20))
            number = self.worker.live[used.request_id].number
            self.waiting.append((step + delay, number, used))
        due = [item for item in self.waiting if item[0] <= step]
        self.waiting = [item for item in self.waiting if item[0] > step]
        for _, number, used in due:
            self.totals[f"answers {self._fate(number, used)}"] += 1
        return tuple(used for *_, used in due)

    def _fate(self, number: int, used: UsedBlocks) -> str:
        """Say what has become of the event that an answer is about."""
        state = self.scheduler.kv_policy_planner.states.get(used.request_id)
        if state is None:
            return "after the end"
        if state.serial == used.serial:
            return "in time"
        live = self.worker.live.get(used.request_id)
        is_same = live is not None and live.number == number and state.ordinal
        return "after another event" if is_same else "after a preemption"
