"""Calls for events when the pool runs short, and as deep as it needs.

With `--kv-events pressure` nobody is cut while there is room. Where the forecast says
that the pool will run short, or a request waits that would fit if others held less,
events are called for, so early that their query windows fill before. Requests are cut
to a common level, water-filling from the longest: the highest level that makes enough
room for all to grow by an interval, and never below a request's own budget, its floor.
So those who are cut end alike, and nobody is cut again before an interval has passed,
unless all are at their floors or somebody enters.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.engine_state import EngineState
from vllm_kvpolicy.block_manager.forecast import (
    HORIZON,
    Forecast,
    course_peak,
    is_worth,
)
from vllm_kvpolicy.block_manager.levels import Levels, Row, by_urgency, water_fill
from vllm_kvpolicy.block_manager.other_groups import held_by_no_others
from vllm_kvpolicy.block_manager.planner import Call, RequestState
from vllm_kvpolicy.events import after_event
from vllm_kvpolicy.observe.metrics import CEILING, ENTERING, GROWTH, PRIORITY

SHARES = (1, 2, 4)  # parts of an interval by which all may grow, while they find room
EARLY = 32  # steps by which calls begin earlier where a few in each step suffice


@dataclass
class Pressure:
    """Decides who has an event, when, and how deep, for one engine.

    Args:
        rebook: books a request anew, by id, after a call.
        expected: returns how many tokens a request will have.
        room: returns the superblocks of the pool but those taken without a booking.

    Attributes:
        level: tokens per KV head to which the last calls have cut, what is pinned not
            included; None before any.
        num_calls: by cause.
    """

    engine: EngineState
    rebook: Callable[[str], None]
    expected: Callable[[Request], int]
    room: Callable[[], int]
    level: int | None = None
    num_calls: Counter[str] = field(default_factory=Counter)
    # What all hold that are cut to their floors as often as they may be.
    at_floors: Forecast = field(default_factory=lambda: Forecast(dtype=np.float64))
    # Superblocks that one needs, while it computes its prompt, that could not enter.
    _demand: dict[str, int] = field(default_factory=dict)
    # By running request, superblocks that it holds at its floor, on the average.
    _floors: dict[str, float] = field(default_factory=dict)
    # Of running requests: the share of time in which a window is open and its
    # superblocks, what they make together, and those that have been called for.
    _windows: dict[str, tuple[float, int]] = field(default_factory=dict)
    _wanted: int | None = None
    _called: dict[str, int] = field(default_factory=dict)

    # -- who may enter --------------------------------------------------------------

    @property
    def lead_steps(self) -> int:
        """Steps in which events that are all called for now have made room."""
        rounds = len(self.engine.running) // self.engine.planner.limits.events_per_step
        return self._effect + rounds

    @property
    def notice(self) -> int:
        """Most tokens from a call to its event: queries to read, or drafts."""
        return max(self.engine.window_tokens, self.engine.num_drafts)

    @property
    def _effect(self) -> int:
        """Steps from a call to what comes back."""
        return self.notice + self.engine.late_steps + 1

    def reserve(self, last: int) -> np.ndarray:
        """Return [last + 1] int64: superblocks of windows that may still be called for.

        As many as are open at once on the average, and one window at least, less those
        that have been called for, until their events.
        """
        if self._wanted is None:
            mean = sum(share * blocks for share, blocks in self._windows.values())
            most = max((blocks for _, blocks in self._windows.values()), default=0)
            self._wanted = max(math.ceil(mean), most)
        found, engine = np.full(last + 1, self._wanted), self.engine
        for request_id in list(self._called):
            call = engine.planner.states[request_id].call
            if call is None:
                del self._called[request_id]
                continue
            # Longer than it has to be in a prompt, which takes fewer steps than tokens.
            steps = call.position - engine.running[request_id].num_computed_tokens
            found[: max(steps, 0)] -= self._called[request_id]
        return found.clip(0)

    def floor(self, state: RequestState, last: int, in_prompt: bool = True) -> float:
        """Return the superblocks of one that is cut to its floor as often as it may be.

        On the average, as others are cut at other times.

        Args:
            last: how many of its tokens will be computed.
            in_prompt: it has yet to compute tokens of its prompt.
        """
        footprint, sizes = state.footprint, self.engine.manager.others.sizes
        if not state.plan.is_called:
            return footprint.peak_blocks(last) + sizes.most_blocks(last, 1)
        at = footprint.events.budget, footprint.recent, state.spacing
        share = footprint.window_tokens / state.spacing  # of the time one is open
        held = held_at_floor(*at, footprint.block_size)
        mean = held + share * footprint.window_blocks
        mean += footprint.ahead / footprint.block_size
        if state.inside is not None and in_prompt:
            mean = max(mean, course_peak(footprint, state.course(), state.inside[1]))
        return mean + min(sizes.mean_blocks, sizes.most_blocks(last, 1))

    def book(
        self, request_id: str, levels: np.ndarray, pins: np.ndarray, offset: int | None
    ) -> None:
        """Book what a running request holds at its floor.

        Args:
            levels, offset: of its booking in the forecast.
            pins: [any], superblocks that others account for of what it has pinned.
        """
        known = self.at_floors.bookings.get(request_id)
        state = self.engine.planner.states[request_id]
        if known is None or known.offset is None:  # it enters, or begins its answer
            last, in_prompt = self.engine.last[request_id], offset is None
            self._floors[request_id] = self.floor(state, last, in_prompt)
            footprint = state.footprint
            if footprint.window_blocks:
                share = footprint.window_tokens / footprint.events.interval
                self._windows[request_id] = share, footprint.window_blocks
                self._wanted = None
        levels = at_floor(levels, self._floors[request_id], pins)
        self.at_floors.book(request_id, levels, offset)

    def leaves(self, request_id: str) -> None:
        """Forget a request that has ended or is preempted."""
        for known in (self._floors, self._windows, self._called):
            known.pop(request_id, None)
        self.at_floors.cancel(request_id)
        self._wanted = None

    def ask(self, request_id: str, num_blocks: int) -> None:
        """Ask for superblocks for a request that waits; the next step calls for it."""
        self._demand = {request_id: num_blocks}

    # -- calls ------------------------------------------------------------------------

    def relieve(self, waiting: Sequence[Request]) -> None:
        """Call for events where the pool runs short; vLLM has scheduled nothing yet.

        Args:
            waiting: requests that may enter if there is room, first ones first.
        """
        if self.engine.running:
            self._make_room(waiting)
            self._cut_to_ceilings()
        self._demand = {}

    def _make_room(self, waiting: Sequence[Request]) -> None:
        manager, most = self.engine.manager, self.engine.forecast.most()
        lead = self.lead_steps
        most += int(self._unforeseen(lead + EARLY)[-1])
        if not waiting and most + manager.num_taken <= manager.num_usable:
            return  # without a look at what no booking accounts for
        usable, no_one = self.room(), np.zeros(lead + 1, np.int64)
        coming = self._coming(waiting) if waiting else no_one
        if most <= usable:  # those who run fit to their ends
            soon = int(self.engine.forecast.ahead(self._effect).max(initial=0))
            if not coming.any() or soon + self._least_window() > usable:
                return  # no call, or not even one that has room for its window
        is_short = self._most(lead, no_one) > usable
        is_early = not (is_short or coming.any())
        if not is_short and self._most(lead + is_early * EARLY, coming) <= usable:
            self._deepen(usable, coming)
            return
        rows = self._rows()
        if not rows:
            return
        cause = GROWTH
        if not (is_short or is_early):
            # Rows have their priorities only where vLLM schedules by priority.
            first = waiting[0].priority if self.engine.by_priority else 0
            is_urgent = any(row.priority > first for row in rows)
            cause = PRIORITY if is_urgent else ENTERING
        self._call(rows, usable, coming, cause)

    def _least_window(self) -> int:
        """Return the superblocks of a window that the next call takes, at least.

        None where one has been called already, which may become deeper.
        """
        states = map(self.engine.planner.states.__getitem__, self.engine.running)
        windows = (
            0 if state.call is not None else state.footprint.window_blocks
            for state in states
            if state.plan.is_called
        )
        return min(windows, default=0)

    def _deepen(self, usable: int, coming: np.ndarray) -> None:
        """Have the events of this step leave less where the pool will run short.

        That is before anybody can be cut again. Who is less urgent is cut first.
        """
        planner = self.engine.planner
        states, size = planner.states, planner.limits.block_size
        again, is_due = [], False
        for request_id, request in self.engine.running.items():
            state, computed = states[request_id], request.num_computed_tokens
            if state.call is None:
                again.append(max(state.soonest_call - computed, 0))
            elif state.call.position == computed:
                again.append(state.spacing)
                is_due = True
        if not is_due:
            return
        lacking = self._most(self.lead_steps + min(again), coming) - usable
        if lacking <= 0:
            return
        rows = self._rows()
        chosen = water_fill(rows, lacking, size) or Levels(rows, size).cut_to(0)
        others = (row.priority for row, _ in chosen if not row.is_due)
        least = max(others, default=-math.inf)
        for row, budget in chosen:
            if row.is_due and row.priority >= least:
                call = Call(row.position, row.pinned + budget)
                self.level = budget
                self._have(row.request_id, call, GROWTH)

    def _rows(self) -> list[Row]:
        """Return all that can be cut, or cut deeper than was called for."""
        return [row for row in map(self._row, self.engine.running) if row is not None]

    def _cut_to_ceilings(self) -> None:
        """Call for events of those who soon hold an interval above their ceiling."""
        engine, no_one = self.engine, np.zeros(1, np.int64)
        for request_id, request in engine.running.items():
            state = engine.planner.states[request_id]
            if state.plan.ceiling is None or state.call is not None:
                continue
            state.computed = request.num_computed_tokens
            soon, position = self._effect, state.ceiling_event
            if state.computed < request.num_tokens - 1:  # a prompt, or computed again
                soon += engine.prompt_step
                position = max(position, request.num_tokens)
            # An event inside a prompt may come before, or begin to read queries before.
            before = state.next_event(state.computed) - state.footprint.window_tokens
            latest = min(state.computed + soon, engine.last[request_id])
            if position > latest or position >= before:
                continue
            # No shortage asks for it, so there has to be room for its window.
            if self._most(self._effect, no_one) <= self.room():
                self._have(request_id, Call(position, state.plan.ceiling), CEILING)

    def _have(self, request_id: str, call: Call, cause: str) -> None:
        """Have a running request cut; a deeper event is not counted once more."""
        state = self.engine.planner.states[request_id]
        self.num_calls[cause] += state.call is None
        self.engine.planner.call(request_id, call)
        if request_id in self._windows:
            self._called[request_id] = state.footprint.window_blocks
        self.rebook(request_id)

    def _coming(self, waiting: Sequence[Request]) -> np.ndarray:
        """Return [lead + 1] int64: what those who wait will hold in steps to come.

        They enter one after the other, as far as there is room beside all floors and
        the watermark, each when the prompts before its own have been computed.
        """
        manager, watermark = self.engine.manager, self.engine.watermark
        lead, size, sizes = self.lead_steps, manager.block_size, manager.others.sizes
        coming, room = np.zeros(lead + 1, np.int64), self.room() - watermark
        running = self.engine.running.values()
        left = (each.num_tokens - each.num_computed_tokens for each in running)
        tokens = sum(each for each in left if each > 1)  # of prompts under way
        held = np.zeros(0)  # by those before it, at their floors
        seen: set[Any] = set()
        for request in waiting:
            state = self.engine.planner.states.get(request.request_id)
            start = tokens // self.engine.step_tokens
            if start > lead:
                break
            known = request.num_tokens
            last = min(self.expected(request), known + HORIZON)
            reach = np.arange(known, last + 1) + manager.lookahead_tokens
            levels = -(-reach // size) + sizes.most_blocks(known)
            floor = float(levels[-1])  # without a bound
            if state is not None and state.plan.is_called:
                floor = float(self.floor(state, last))
            cached = 0
            if state is None or state.plan.takes_hits:
                cached = self._num_cached(request, seen)
            pinned = 0 if state is None else min(state.pinned, cached)
            more = np.minimum(levels, floor)
            # Until a call can have taken effect it holds all of it.
            more[: lead + 1] = np.maximum(more[: lead + 1], levels[: lead + 1])
            more -= pinned
            short, both = sorted((held, more), key=len)
            both = both.copy()
            both[: len(short)] += short
            asked = self._demand.get(request.request_id)
            is_sure = asked is not None and not watermark
            if not (is_sure or is_worth(self.at_floors.beside(both), room, known)):
                break
            coming[start:] += int(levels[0]) - cached if asked is None else asked
            held = both
            tokens += known
        coming[coming > 0] += watermark
        return coming

    def _num_cached(self, request: Request, seen: set[Any]) -> int:
        """Return the superblocks of a request that others hold, or are about to."""
        manager = self.engine.manager
        if not manager.enable_caching:
            return 0
        pool, group = manager.block_pool, [manager.kv_cache_group_id]
        found, hashes = 0, manager.hashes(request)
        for each in hashes:
            if each in seen:
                found += 1
                continue
            cached = pool.get_cached_block(each, group)
            if not cached:
                break
            found += cached[0].ref_cnt > 0
        seen.update(hashes)
        return found

    def _most(self, last: int, coming: np.ndarray, first: int = 0) -> int:
        """Return the most that is held in the steps `first` to `last` from here."""
        load = self.engine.forecast.ahead(last)
        held = np.full(last + 1, coming[-1])
        held[: len(coming)] = coming[: last + 1]
        held[: len(load)] += load
        held += self._unforeseen(last)
        return int((held + self.reserve(last))[first:].max())

    def _unforeseen(self, last: int) -> np.ndarray:
        """Return [last + 1] int64: by what answers without a booking grow, on average.

        How much their last superblocks have room for is not looked at.
        """
        manager, booked = self.engine.manager, self.engine.forecast.bookings
        count = sum(each not in booked for each in manager.req_to_blocks)
        tokens = np.arange(last + 1) * (1 + self.engine.num_drafts)
        return -(-count * tokens // manager.block_size)

    def _row(self, request_id: str) -> Row | None:
        """Return what can be asked of a request; None where it cannot be cut.

        If its event has been called for, by how much that can be deeper: room that was
        there then may be gone.
        """
        engine = self.engine
        state, request = engine.planner.states[request_id], engine.running[request_id]
        if not state.plan.is_called:
            return None
        call, footprint, shared = state.call, state.footprint, 0
        most = self._most_tokens(request)
        if call is not None:
            position, held, spacing = call.position, call.budget, footprint.block_size
            latest = position
            blocks = state.num_dest(position)
        else:
            state.computed = request.num_computed_tokens
            position, spacing = state.soonest_call, state.spacing
            # The last queries of a prompt know best what it needs, and are there soon.
            # In an answer only an event at once needs no superblock of a full pool.
            known, soonest = request.num_tokens, max(position, state.computed + 2)
            in_prompt = self.lead_steps * engine.prompt_step
            if soonest <= known <= state.computed + in_prompt:
                position = known
            elif position > state.computed + self.lead_steps:
                return None  # it had its last event just now
            # An event inside a prompt may come before, or begin to read queries before.
            before = state.next_event(state.computed) - footprint.window_tokens
            latest = min(before, most) - 1
            if position > latest:
                return None
            held = position - state.dropped_tokens
            blocks = footprint.frontier_blocks(position) - state.dropped_blocks
            if not state.ordinal:
                shared = max(engine.manager.num_shared(request_id) - state.pinned, 0)
        frontier = footprint.frontier_blocks(position)
        return Row(
            request_id=request_id,
            priority=request.priority if engine.by_priority else 0,
            position=position,
            latest=latest,
            held=held - state.pinned_tokens,
            floor=footprint.events.budget - state.pinned_tokens,
            spacing=spacing,
            local=position - frontier * footprint.block_size,
            whole=blocks - state.pinned - shared,
            shared=shared,
            pinned=state.pinned_tokens,
            wait=position - request.num_computed_tokens,
            ends=position + self.lead_steps >= most,
            is_called=call is not None,
        )

    def _most_tokens(self, request: Request) -> int:
        """Return the most tokens that a request has, prompt and answer."""
        whole = request.num_prompt_tokens + request.max_tokens
        return min(whole, self.engine.max_model_len)

    def _call(
        self, rows: list[Row], usable: int, coming: np.ndarray, cause: str
    ) -> None:
        """Cut rows to the highest level with which the pool does not run short.

        That takes some steps. Where somebody finds no superblock in this one, rows that
        can be cut at once are, to their floors, even if they end soon. While there is
        time, a call is for a few: each event delays its step for all who run.
        """
        limits = self.engine.planner.limits
        size, last = limits.block_size, self.lead_steps + self.notice
        last += EARLY if cause == GROWTH else 0
        lacking = self._most(last, coming, self._effect) - usable
        staying = [row for row in rows if not row.ends]
        chosen = self._to_level(staying, usable, coming)
        chosen = chosen or self._to_level(rows, usable, coming)
        is_late = lacking <= 0 or not chosen
        if is_late:
            lacking = int(self.engine.forecast.ahead(0).max(initial=0)) - usable
            now = [row for row in rows if not (row.wait or row.is_called)]
            chosen = Levels(now, size).cut_to(0)
            chosen.sort(key=by_urgency)
        if lacking <= 0 or not chosen:
            return
        # The others are cut when they are due, so that few windows are open at once.
        budgets = np.array([budget for _, budget in chosen])
        gains = Levels([row for row, _ in chosen], size).gains(budgets)
        gains = gains.cumsum()
        del chosen[int(np.searchsorted(gains, lacking)) + 1 :]
        self.level = min(budget for _, budget in chosen)
        most, place = len(chosen), 0
        if not is_late and cause != PRIORITY:
            at_once = self._most(self._effect, coming, self._effect) - usable
            needed = int(np.searchsorted(gains, at_once)) + 1 if at_once > 0 else 0
            most = max(needed, math.ceil(len(self.engine.running) / EARLY))
        for row, budget in chosen:
            if place >= most and not (row.is_called or row.shared):
                continue  # sharers only together give back what they share
            delay = 0 if row.is_called else place // limits.events_per_step
            place += not row.is_called
            position = min(row.position + delay, row.latest)
            self._have(row.request_id, Call(position, row.pinned + budget), cause)

    def _to_level(
        self, rows: list[Row], usable: int, coming: np.ndarray
    ) -> list[tuple[Row, int]]:
        """Return whom to cut to which budget, longest first, urgent ones last."""
        if not rows:
            return []
        interval = max(
            self.engine.planner.states[row.request_id].footprint.events.interval
            for row in rows
        )
        size, first = self.engine.planner.limits.block_size, self._effect
        for share in SHARES:
            last = self.lead_steps + interval // share
            chosen = water_fill(rows, self._most(last, coming, first) - usable, size)
            if chosen is not None:
                break
        else:
            chosen = self._to_floors(rows)
        return sorted(chosen, key=by_urgency)

    def _to_floors(self, rows: list[Row]) -> list[tuple[Row, int]]:
        """Return those who gain something at their floors, alone or together.

        Superblocks that several hold come back once, when all of these have been cut.
        """
        manager, size = self.engine.manager, self.engine.planner.limits.block_size
        sharing = [row for row in rows if row.shared]
        prefixes = [
            manager.req_to_blocks[row.request_id][row.pinned // size :][: row.shared]
            for row in sharing
        ]
        whole = [replace(row, whole=row.whole + row.shared) for row in sharing]
        again = sum(map(len, prefixes)) - held_by_no_others(chain(*prefixes))
        gain = Levels(whole, size).gain(0) - again
        if gain <= Levels(sharing, size).gain(0):
            return Levels(rows, size).cut_to(0)
        together = {row.request_id for row, _ in Levels(whole, size).cut_to(0)}
        alone = {row.request_id for row, _ in Levels(rows, size).cut_to(0)}
        return [(row, row.floor) for row in rows if row.request_id in together | alone]


def at_floor(levels: np.ndarray, floor: float, pins: np.ndarray) -> np.ndarray:
    """Return [S] superblocks held step by step by a request that is at its floor.

    >>> at_floor(np.array([2, 4, 8, 9]), floor=7.0, pins=np.array([3, 3, 3]))
    array([2., 4., 4., 7.])

    Args:
        levels: [S], what it holds if it is not cut, less what others account for.
        floor: all superblocks that it holds at its floor.
        pins: [any], what others account for of that, in the first steps.
    """
    most = np.full(len(levels), floor)
    most[: len(pins)] -= pins[: len(levels)]
    return np.minimum(levels, most)


@lru_cache(maxsize=64)
def held_at_floor(budget: int, recent: int, stretch: int, block_size: int) -> float:
    """Return the mean of superblocks held between events, wherever these lie.

    >>> held_at_floor(budget=96, recent=16, stretch=64, block_size=32)
    4.96875
    """
    held = [
        after_event(budget, local, tokens, block_size)
        for local in range(recent, recent + block_size)
        for tokens in range(0, stretch + 1, max(stretch // 8, 1))
    ]
    return sum(held) / len(held)
