"""Calls for events when the pool runs short, and as deep as it needs.

With `--kv-events pressure` nobody is cut while there is room. Where the forecast says
that the pool will run short, or a request waits that would fit if others held less,
events are called for, so early that their query windows fill before. Requests are cut
to a common level, water-filling from the longest: the highest level that makes enough
room for all to grow by an interval, and never below a request's own budget, its floor.
So those who are cut end alike, and nobody is cut again before an interval has passed,
unless all are at their floors.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.forecast import Forecast
from vllm_kvpolicy.block_manager.manager import KVPolicyManager
from vllm_kvpolicy.block_manager.planner import Call, Planner, RequestState
from vllm_kvpolicy.events import NO_STEP, after_event
from vllm_kvpolicy.observe.metrics import ENTERING, GROWTH, PRIORITY

SHARES = (1, 2, 4)  # parts of an interval by which all may grow, while they find room


@dataclass(frozen=True)
class Demand:
    """What a waiting request would take if it were there.

    Args:
        num_blocks: superblocks that it holds while it computes its prompt.
        priority: vLLM's; a lower number is more urgent.
    """

    num_blocks: int
    priority: int


@dataclass
class Pressure:
    """Decides who has an event, when, and how deep, for one engine.

    Args:
        running: bounded requests that run, by id.
        last: by request, how many of its tokens are expected to be computed.
        rebook: books a request anew, by id, after a call.
        unforeseen: returns the superblocks that no booking accounts for.
        late_steps: by which what is scheduled may be ahead of what has been computed.
        window_tokens: W, most queries that an event reads.
        by_priority: less urgent requests are cut first.
        is_on: there are requests whose events are called for.

    Attributes:
        level: tokens per KV head to which the last calls have cut; None before any.
        num_calls: by cause.
    """

    planner: Planner
    manager: KVPolicyManager
    forecast: Forecast
    running: Mapping[str, Request]
    last: Mapping[str, int]
    rebook: Callable[[str], None]
    unforeseen: Callable[[], int]
    late_steps: int
    window_tokens: int
    by_priority: bool = False
    level: int | None = None
    num_calls: Counter[str] = field(default_factory=Counter)
    _demand: Demand | None = None
    _floors: dict[str, float] = field(default_factory=dict)

    is_on: bool = False

    # -- who may enter --------------------------------------------------------------

    @property
    def lead(self) -> int:
        """Steps from a call to the last of the events that are called for with it."""
        rounds = len(self.running) // self.planner.limits.events_per_step
        return self._effect + rounds

    @property
    def _effect(self) -> int:
        """Steps from a call to what comes back."""
        return self.window_tokens + self.late_steps + 1

    @property
    def reserve(self) -> int:
        """Superblocks for query windows that may be called for beside those that are.

        As many as are open at once on the average.
        """
        if not self.window_tokens:
            return 0
        shares, called = 0.0, 0
        for state in map(self.planner.states.__getitem__, self.running):
            footprint = state.footprint
            share = footprint.window_tokens / footprint.events.interval
            shares += share * footprint.window_blocks
            called += footprint.window_blocks * (state.call is not None)
        return max(math.ceil(shares) - called, 0)

    def floor(self, request_id: str, state: RequestState) -> float:
        """Return the superblocks that a request holds at its floor, on the average.

        It is cut there as often as it may be, and others at other times.
        """
        footprint, last = state.footprint, self.last[request_id]
        if not state.plan.is_called:
            return footprint.peak_blocks(last)
        least = held_at_floor(
            footprint.events.budget,
            footprint.recent,
            state.spacing,
            footprint.block_size,
        )
        share = footprint.window_tokens / state.spacing  # of the time one is open
        return min(least + share * footprint.window_blocks, footprint.blocks(last))

    def enters(self, request_id: str, state: RequestState) -> None:
        """Count the floor of a request that has entered."""
        self._floors[request_id] = self.floor(request_id, state)

    def leaves(self, request_id: str) -> None:
        """Forget a request that has ended or is preempted."""
        self._floors.pop(request_id, None)

    def fits_by_floors(self, num_blocks: float) -> bool:
        """Return whether calls could make room for a request.

        Args:
            num_blocks: that it holds while it computes its prompt.
        """
        taken = sum(self._floors.values()) + self.unforeseen()
        return taken + num_blocks <= self.manager.num_usable

    def ask(self, num_blocks: int, priority: int) -> None:
        """Ask for room for a request that waits; the next step calls for it."""
        self._demand = Demand(num_blocks, priority)

    # -- calls ------------------------------------------------------------------------

    def relieve(self) -> None:
        """Call for events where the pool runs short; vLLM has scheduled nothing yet."""
        demand, self._demand = self._demand, None
        usable = self.manager.num_usable - self.unforeseen()
        is_short = self.forecast.most() > usable
        usable -= self.reserve
        is_short = is_short and self.forecast.soon(self.lead) > usable
        if not is_short and demand is None:
            return
        wanted = 0 if demand is None else demand.num_blocks
        rows = [row for row in map(self._row, self.running) if row is not None]
        if not rows:
            return
        cause = GROWTH
        if not is_short and demand is not None:
            urgent = any(row.priority > demand.priority for row in rows)
            cause = PRIORITY if self.by_priority and urgent else ENTERING
        self._call(rows, usable - wanted, cause)

    def _row(self, request_id: str) -> "Row | None":
        """Return what can be asked of a request; None where it cannot be cut."""
        state, request = self.planner.states[request_id], self.running[request_id]
        if not state.plan.is_called or state.call is not None:
            return None
        state.computed = request.num_computed_tokens
        position = state.soonest_call
        footprint = state.footprint
        # An event inside a prompt may come before, or begin to read queries before.
        known = state.next_event(state.computed)
        if known <= position + footprint.window_tokens:
            return None
        if position >= self.last[request_id]:
            return None
        frontier = footprint.frontier_blocks(position)
        shared = 0 if state.ordinal else self.manager.num_shared(request_id)
        return Row(
            request_id=request_id,
            priority=request.priority if self.by_priority else 0,
            position=position,
            held=position - state.dropped_tokens,
            floor=footprint.events.budget,
            spacing=state.spacing,
            local=position - frontier * footprint.block_size,
            whole=state.global_blocks - state.frontier_blocks + frontier - shared,
        )

    def _call(self, rows: list["Row"], usable: int, cause: str) -> None:
        """Cut rows to the highest level with which the pool does not run short."""
        interval = max(
            self.planner.states[row.request_id].footprint.events.interval
            for row in rows
        )
        size = self.planner.limits.block_size
        for share in SHARES:
            last = self.lead + interval // share
            lacking = self.forecast.soon(last, self._effect) - usable
            chosen = water_fill(rows, lacking, size)
            if chosen is not None:
                break
        else:
            chosen = [(row, row.floor) for row in rows if row.gain(row.floor, size)]
        if not chosen:
            return
        chosen.sort(key=lambda each: (-each[0].priority, each[1] - each[0].held))
        # The others are cut when they are due, so that few windows are open at once.
        last = self.lead + self.window_tokens
        lacking = self.forecast.soon(last, self._effect) - usable
        if lacking <= 0:
            return
        gains = accumulate(row.gain(budget, size) for row, budget in chosen)
        enough = next((i for i, gain in enumerate(gains) if gain >= lacking), NO_STEP)
        del chosen[enough + 1 :]
        self.level = min(budget for _, budget in chosen)
        for place, (row, budget) in enumerate(chosen):
            delay = place // self.planner.limits.events_per_step
            self.planner.call(row.request_id, Call(row.position + delay, budget))
            self.rebook(row.request_id)
        self.num_calls[cause] += len(chosen)


@lru_cache(maxsize=64)
def held_at_floor(budget: int, recent: int, stretch: int, block_size: int) -> float:
    """Return the mean of superblocks held between events, wherever these lie.

    >>> held_at_floor(budget=96, recent=16, stretch=64, block_size=32)
    4.984375
    """
    held = [
        after_event(budget, local, tokens, block_size)
        for local in range(recent, recent + block_size)
        for tokens in range(0, stretch + 1, max(stretch // 8, 1))
    ]
    return sum(held) / len(held)


@dataclass(frozen=True)
class Row:
    """A running request that may be cut.

    Args:
        position: of its event.
        held: tokens per KV head that it would hold there.
        floor: K, fewest tokens to which it is cut.
        spacing: fewest tokens that an event drops.
        local: tokens behind the frontier there.
        whole: superblocks before the frontier, less those that others hold, too.
    """

    request_id: str
    priority: int
    position: int
    held: int
    floor: int
    spacing: int
    local: int
    whole: int

    def gain(self, budget: int, size: int) -> int:
        """Return the superblocks that an event gives back; 0 where it is not worth it.

        Args:
            size: N, tokens per superblock.
        """
        if self.held - budget < self.spacing:
            return 0
        return max(self.whole - -(-(budget - self.local) // size), 0)


def water_fill(
    rows: list[Row], lacking: int, size: int
) -> list[tuple[Row, int]] | None:
    """Return who is cut, and to what, so that enough superblocks come back.

    Those of the least urgent class first; of a class all to the same level, the highest
    that suffices, and none below its floor.

    >>> row = Row("a", 0, 400, 400, 64, 8, 16, 24)
    >>> [(each.request_id, budget) for each, budget in water_fill([row], 5, 16)]
    [('a', 320)]

    Args:
        lacking: superblocks that have to come back.
        size: N, tokens per superblock.

    Returns:
        None where even the floors give back too little.
    """
    chosen: list[tuple[Row, int]] = []
    for priority in sorted({row.priority for row in rows}, reverse=True):
        of_class = [row for row in rows if row.priority == priority]
        levels = Levels(of_class, size)
        level = levels.highest(lacking)
        chosen += levels.cut_to(level or 0)
        if level is not None:
            return chosen
        lacking -= levels.gain(0)
    return None


class Levels:
    """What rows give back when all are cut to one level.

    Args:
        size: N, tokens per superblock.
    """

    def __init__(self, rows: list[Row], size: int) -> None:
        self.rows, self.size = rows, size
        columns = zip(
            *((row.held, row.floor, row.spacing, row.local, row.whole) for row in rows),
            strict=True,
        )
        self.held, self.floor, self.spacing, self.local, self.whole = map(
            np.array, columns
        )

    def _gains(self, level: int) -> np.ndarray:
        budget = np.maximum(self.floor, level)
        kept = -(-(budget - self.local) // self.size)
        is_worth = self.held - budget >= self.spacing
        return np.where(is_worth, np.maximum(self.whole - kept, 0), 0)

    def gain(self, level: int) -> int:
        """Return the superblocks that come back at a level."""
        return int(self._gains(level).sum())

    def highest(self, lacking: int) -> int | None:
        """Return the highest level at which enough comes back; None for none."""
        if lacking <= 0:
            return int(self.held.max())
        low, high = 0, int(self.held.max())
        if self.gain(low) < lacking:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.gain(middle) >= lacking:
                low = middle
            else:
                high = middle
        return low

    def cut_to(self, level: int) -> list[tuple[Row, int]]:
        """Return those who are cut at a level, and to what."""
        gains, budget = self._gains(level), np.maximum(self.floor, level)
        return [(self.rows[i], int(budget[i])) for i in np.flatnonzero(gains)]
