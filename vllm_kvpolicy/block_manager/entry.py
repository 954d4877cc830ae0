"""Decides which waiting requests may start, so that those that run need not stop.

vLLM admits a request when its prompt fits and preempts one when the pool is full. What
bounded requests will hold is known, so that both can be foreseen: a waiting one enters
when the forecast with it stays within the pool, a running one sits a step out where it
would take the last superblocks with which somebody gets to the next event. "Who enters"
in docs/how-it-works.md says what else there is, and why.

Where vLLM speculates, drafts take superblocks, and how fast a request advances is not
known: it is expected to hold the most of the next superblock of tokens, and booked anew
when it has left its booking behind.
"""

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.engine_state import EngineState
from vllm_kvpolicy.block_manager.forecast import (
    HORIZON,
    PRICE,
    computed_levels,
    course_peak,
    held_levels,
    is_worth,
    window_levels,
)
from vllm_kvpolicy.block_manager.output_lengths import OutputLengths, may_stop
from vllm_kvpolicy.block_manager.planner import RequestState
from vllm_kvpolicy.block_manager.pressure import Pressure, at_floor
from vllm_kvpolicy.block_manager.sharing import Sharing
from vllm_kvpolicy.events import NO_STEP
from vllm_kvpolicy.sizes import OtherGroups

MOST_WAITS = 128  # steps in a row that a request sits out for newer ones
NOBODY: frozenset[str] = frozenset()


@dataclass
class Entry(EngineState):
    """Decides who enters and who waits, for one engine.

    Attributes:
        pressure: calls for the events of requests that have them on call.
        num_held_back: steps in which a waiting request could not enter.
        num_waits: steps that running requests sat out for others.
    """

    lengths: OutputLengths = field(default_factory=OutputLengths)
    num_held_back: int = 0
    num_waits: int = 0
    # Who claims superblocks of less urgent requests, and how many: `_claim_room`.
    claim: tuple[Request, int] | None = None
    _entered: list[str] = field(default_factory=list)
    # Requests that have sat a step out and are behind their bookings.
    _stopped: list[str] = field(default_factory=list)
    # Tokens not computed because nobody was preempted, before this step and in it.
    _num_lost: int = 0
    _num_waiting: int = 0
    # By request that waits for others to be cut, since which step.
    _since: dict[str, int] = field(default_factory=dict)
    # By request, how many steps in a row it has sat out.
    _waits: dict[str, int] = field(default_factory=dict)
    # What each request misses until its next event or end, and how many steps that
    # takes; and in which step, after how many events, with how many free superblocks
    # and without whom that was counted.
    _ways: tuple[tuple[Any, ...], list[tuple[int, int]]] = (), []

    def __post_init__(self) -> None:
        self.lengths.unfinished = self._unfinished
        self.shared = Sharing(self)
        self.pressure = Pressure(
            self,
            rebook=self.rebook,
            expected=self._expected,
            room=self._room,
        )

    @property
    def _draft_slack(self) -> int:
        """Tokens by which a request may be ahead of its booking."""
        return self.manager.block_size if self.num_drafts else 0

    @property
    def _others(self) -> OtherGroups:
        """What layers with a sliding window hold beside."""
        return self.manager.others.sizes

    def _unfinished(self) -> Iterator[int]:
        """Yield how long the answers are that run and may stop."""
        for request in self.running.values():
            if may_stop(request):
                yield request.num_output_tokens

    # -- the life of a request ----------------------------------------------------

    def admits(
        self,
        request: Request,
        computed: int,
        num_new: int,
        leaving: frozenset[str] = NOBODY,
    ) -> int:
        """Return how many tokens a waiting request computes in this step; 0 for none.

        For what less urgent ones give, see `_claim_room`.

        Args:
            computed: its tokens that the prefix cache gives it.
        """
        request_id, state = request.request_id, self._bounded(request.request_id)
        self.claim = None
        self._take_turn(request)
        if state is not None:
            if state.plan.is_called:
                self.planner.plan_inside(request_id, None)
            levels, offset = self._levels(request, state, computed, num_new)
            may_enter = True
            if state.plan.is_called:
                may_enter = self._fits_by_floors(request, state, levels)
                if not may_enter:
                    # Not whole, so with the events of its plan, as in `always`.
                    first = computed + state.footprint.window_tokens + 1
                    self.planner.plan_inside(request_id, (first, request.num_tokens))
                    num_new = min(num_new, state.target - computed)
                    levels, offset = self._levels(request, state, computed, num_new)
                    may_enter = self._fits_by_floors(request, state, levels)
                if may_enter and self._waits_for_cuts(request_id):
                    leaving = NOBODY  # less urgent ones are cut instead
                elif leaving:
                    may_enter = self._fits_by_floors(request, state, levels, leaving)
                may_enter = may_enter or self._is_alone(leaving)
            if not (may_enter and self._fits(request, levels, leaving)):
                if state.plan.is_called:
                    if may_enter:
                        self.pressure.ask(request_id, self._soon(state, levels))
                    self.planner.plan_inside(request_id, None)
                self.num_held_back += 1
                return 0
            self._entered.append(request_id)
            self.running[request_id] = request
            self._book(request_id, levels, offset)
        if leaving:
            shared = self.shared.of(request_id)
            self._claim_room(request, shared.loose + shared.pinned, leaving)
        return num_new

    def _claim_room(
        self, request: Request, num_shared: int, leaving: frozenset[str]
    ) -> None:
        """Claim what a request takes to enter, if that comes back at all.

        vLLM preempts for the sake of requests that run, not of those that wait. So what
        a waiting one takes counts as taken in the turns of less urgent requests: these
        take no more, and vLLM preempts the last of them until as much is free. vLLM
        waives the watermark where nobody else runs.

        Args:
            num_shared: superblocks of its cached prefix that others go on holding.
        """
        manager, known = self.manager, request.num_tokens
        needed = self.planner.peak_blocks(request.request_id, known, num_shared)
        if needed is None:
            needed = cdiv(known, manager.block_size) - num_shared
        needed += self._others.most_blocks(known)
        staying = manager.num_staying(leaving)
        room = manager.num_usable - staying
        wanted = needed + self.watermark
        if not staying:
            wanted = max(needed, min(wanted, room))
        if wanted <= room:
            self.claim = request, wanted

    def _drop_claim_of(self, request_ids: Container[str]) -> None:
        """Claim nothing for requests that have entered or are gone."""
        if self.claim is not None and self.claim[0].request_id in request_ids:
            self.claim = None

    def _take_turn(self, request: Request) -> None:
        """Note whose turn it is, and so what it leaves to a more urgent one."""
        self.manager.claimed = 0
        if self.claim is not None and request.priority > self.claim[0].priority:
            self.manager.claimed = self.claim[1]

    def _waits_for_cuts(self, request_id: str) -> bool:
        """Return whether cuts may still make room for a request in time.

        As long as one takes that is called for as soon as the request is there, and as
        long as one is called for. After that vLLM preempts less urgent ones, as it does
        without a policy.
        """
        step, states = self.forecast.step, self.planner.states
        waited = step - self._since.setdefault(request_id, step)
        is_called = any(states[each].call is not None for each in self.running)
        return waited < 2 or (is_called and waited <= self.pressure.lead_steps)

    def follow(self, request: Request, computed: int, num_new: int) -> None:
        """Book a running request anew where it is not where it was expected."""
        booking = self.forecast.bookings.get(request.request_id)
        if booking is None:
            return
        step = self.forecast.step
        if booking.offset is None:
            as_expected = computed + num_new < request.num_tokens
        else:
            as_expected = 0 <= computed - step - booking.offset <= self._draft_slack
            as_expected &= computed + num_new <= self.last[request.request_id]
        if self.shared.is_over(request.request_id):
            self.shared.look_again(request.request_id)
            as_expected = False
        if as_expected and step < booking.end:
            return
        state = self.planner.states[request.request_id]
        levels, offset = self._levels(request, state, computed, num_new)
        self._book(request.request_id, levels, offset)

    def foresee(self, waiting: Sequence[Request]) -> None:
        """Call for events that the pool will need; a step is about to be scheduled.

        Args:
            waiting: requests that may enter if there is room, first ones first.
        """
        for request_id in self._stopped:
            self.rebook(request_id)
        self._stopped.clear()
        self.pressure.relieve(waiting)

    def rebook(self, request_id: str) -> None:
        """Book a running request anew before its turn, because its events changed."""
        request = self.running.get(request_id)
        if request is None:
            return
        state, computed = self.planner.states[request_id], request.num_computed_tokens
        self.shared.look_again(request_id)
        known = request.num_tokens + request.num_output_placeholders
        num_new = max(min(known - computed, self.step_tokens), 1)
        levels, offset = self._levels(request, state, computed, num_new)
        self._book(request_id, levels, offset)

    def _book(self, request_id: str, levels: np.ndarray, offset: int | None) -> None:
        self.forecast.book(request_id, levels, offset)
        if self.calls_events:
            pins = self.shared.pins(request_id)
            self.pressure.book(request_id, levels, pins, offset)

    def leave(self, request: Request) -> None:
        """Forget a request that has been preempted or has ended; learn from the end."""
        self._forget(request.request_id)
        self._since.pop(request.request_id, None)
        self._num_lost = 0
        self._drop_claim_of((request.request_id,))
        self.lengths.learn_from(request)

    def finish_step(self, scheduled: Collection[str]) -> None:
        """Go on to the next step; forget who was let in and found no superblock."""
        for request_id in self._entered:
            if request_id not in scheduled:
                self._forget(request_id)
        self._entered.clear()
        self._drop_claim_of(scheduled)
        self.forecast.step += 1
        self.pressure.at_floors.step += 1
        # One that is preempted computes nothing, either.
        lost = self._num_waiting - bool(scheduled)
        self._num_lost = max(self._num_lost + lost, 0)
        self._num_waiting = 0

    def _forget(self, request_id: str) -> None:
        self.forecast.cancel(request_id)
        self.pressure.leaves(request_id)
        known = self.shared.by_request, self.last, self.running, self._waits
        for each in known:
            each.pop(request_id, None)

    # -- who may enter ------------------------------------------------------------

    def _fits(
        self, request: Request, levels: np.ndarray, leaving: frozenset[str]
    ) -> bool:
        """Return whether the pool bears one more request, see `is_worth`.

        Args:
            leaving: requests that find no room beside it, where there is none.
        """
        if self._is_alone(leaving):
            return True
        room = self._room(leaving)
        held = self.forecast.beside(levels, leaving)
        price = self._tokens_alone(request)
        if not self.calls_events and not is_worth(held, room, price):
            return False
        if self.calls_events and held.max() > room:
            held = held[: self.pressure.lead_steps + 1]
            reserve = self.pressure.reserve(len(held) - 1)
            return int((held + reserve).max()) <= room
        staying = self.manager.num_staying(leaving)
        left = self.manager.num_usable - staying - int(levels[0])
        return left >= levels.max() - levels[0] or self._proceeds(left, leaving)

    def _is_alone(self, leaving: frozenset[str]) -> bool:
        """Return whether nobody else holds anything when these have left."""
        is_last = self.forecast.bookings.keys() <= leaving
        return is_last and not self.manager.num_staying(leaving)

    def _soon(self, state: RequestState, levels: np.ndarray) -> int:
        """Return what a request holds until an event that is called now has passed."""
        soon = int(levels[: self.pressure.lead_steps + 1].max())
        return soon + state.footprint.window_blocks

    def _fits_by_floors(
        self,
        request: Request,
        state: RequestState,
        levels: np.ndarray,
        leaving: frozenset[str] = NOBODY,
    ) -> bool:
        """Return whether there is room beside all others at their floors.

        That calls can make; see `is_worth`.
        """
        pressure, request_id = self.pressure, request.request_id
        floor = pressure.floor(state, self.last[request_id])
        held = at_floor(levels, floor, self.shared.pins(request_id))
        steps = pressure.lead_steps + 1
        held[:steps] = np.maximum(held[:steps], self._soon(state, levels))
        held = pressure.at_floors.beside(held, leaving)
        return is_worth(held, self._room(), self._tokens_alone(request))

    def _tokens_alone(self, request: Request) -> int:
        """Return the tokens of a waiting request less what others have pinned of them.

        If it is preempted they are computed again, and no others. A superblock at
        least, so that it gets so far before it stops. What is not pinned may be gone by
        then, as may what layers with a window need to begin behind it.
        """
        size = self.manager.block_size
        pinned = self.shared.of(request.request_id).pinned
        kept = 0 if self._others.count else pinned * size
        return max(request.num_tokens - kept, size)

    def _room(self, leaving: frozenset[str] = NOBODY) -> int:
        """Return the superblocks of the pool, less those that stay without a booking.

        Args:
            leaving: requests of which nothing stays.
        """
        usable, staying = self.manager.num_usable, self.manager.num_staying(leaving)
        step, bookings = self.forecast.step, self.forecast.bookings
        rows = self.manager.req_to_blocks.keys()
        is_simple = not leaving and rows <= bookings.keys()
        is_simple = is_simple and not self.shared.has_any
        if is_simple and all(booking.end > step for booking in bookings.values()):
            return usable  # without a look at every superblock
        others = bookings.keys() - leaving
        booked = [name for name in others if bookings[name].end > step]
        foreseen = self.manager.num_held_by(booked)
        foreseen -= sum(self.shared.discount(name, step) for name in booked)
        return usable - max(staying - foreseen, 0)

    def _expected(self, request: Request) -> int:
        """Return how many tokens a request will have, prompt and answer."""
        expected = self.lengths.expected_of(request) + self.num_drafts
        return min(request.num_prompt_tokens + expected, self.max_model_len)

    def _levels(
        self, request: Request, state: RequestState, computed: int, num_new: int
    ) -> tuple[np.ndarray, int | None]:
        """Return what a request will hold from this step on, and its offset.

        Less what others account for.
        """
        levels, offset = self._own_levels(request, state, computed, num_new)
        pins = self.shared.pins(request.request_id)[: len(levels)]
        levels[: len(pins)] -= pins
        return levels, offset

    def _own_levels(
        self, request: Request, state: RequestState, computed: int, num_new: int
    ) -> tuple[np.ndarray, int | None]:
        """Return the same with all that is pinned.

        In how many steps it computes a prompt depends on others. They are counted as if
        it was alone, and what it has held by then as if it kept that.
        """
        footprint = state.footprint
        known = request.num_tokens + request.num_output_placeholders
        end = min(computed + num_new, known)  # drafts may be rejected
        # An answer's last token is not computed.
        last = max(self._expected(request) - 1, computed + num_new)
        self.last[request.request_id] = last
        course = state.course() if state.plan.is_called else None
        if end < known:
            peak = footprint.peak_blocks(known)
            if course is not None:
                peak = course_peak(footprint, course, known)
            coming = held_levels(footprint, known, min(last, known + HORIZON), course)
            num_steps = -(-(known - computed) // self.prompt_step)
            levels = np.concatenate([np.full(num_steps, peak), coming])
            levels = np.maximum.accumulate(levels) + self._others.most_blocks(last)
            return levels, None
        positions = computed, end, min(last, end + HORIZON)
        slack = self._draft_slack
        ahead = slack + self.num_drafts
        levels = computed_levels(footprint, positions, ahead, course).copy()
        shared = self.shared.of(request.request_id)
        first_event = state.first_event - slack  # as soon as it may come
        num_before = min(first_event - end + 1, shared.until - self.forecast.step)
        levels[: max(num_before, 0)] -= shared.loose
        if self._others.count and self.num_drafts:  # it may be ahead, or behind
            levels += self._others.most_blocks(last, 1 + self.num_drafts)
        elif self._others.count:
            beside = self.manager.others.held(request.request_id)
            levels += window_levels(self._others, positions, beside)
        levels = np.pad(levels, (0, self.late_steps), "edge")
        return levels, end - self.forecast.step - 1

    # -- who may go on ------------------------------------------------------------

    def allowed(
        self,
        request: Request,
        computed: int,
        num_new: int,
        find_victim: Callable[[], Request],
    ) -> int:
        """Return how many tokens a running request computes in this step.

        0 where the superblocks that it would take are the last ones with which
        somebody gets to an event or the end. But where nobody does, where the victim
        has a lower priority, and where to wait costs more than to preempt the victim,
        `num_new`: vLLM preempts then. Part of a prompt where that is what fits.

        Args:
            find_victim: returns whom vLLM would preempt.
        """
        request_id = request.request_id
        self._take_turn(request)
        free = self._num_free
        if request_id not in self.forecast.bookings or free < 0:
            return num_new
        is_free = free >= self._most_missing(request_id)
        if is_free or self._may_take(request_id, computed + num_new):
            self._waits.pop(request_id, None)
            return num_new
        victim = find_victim()
        if self.by_priority and victim.priority > request.priority:
            return num_new
        fitting = self._fitting(request_id, computed, num_new)
        if fitting < num_new and self._may_take(request_id, computed + fitting):
            return fitting
        waited = self._waits.get(request_id, 0)
        is_late = waited >= MOST_WAITS and victim is not request
        missing = self.manager.num_needed(request_id, computed + num_new) - free
        if is_late or self._is_dear(victim, missing):
            return num_new
        self._waits[request_id] = waited + 1
        self.num_waits += 1
        self._num_waiting += 1
        if self.calls_events:
            self._stopped.append(request_id)
        return 0

    def _is_dear(self, victim: Request, missing: int) -> bool:
        """Return whether to wait costs more tokens than to preempt the victim.

        What others have pinned of it is not computed again, where vLLM need not preempt
        another one besides, for the superblocks that are missing.

        Until somebody gives superblocks back, those who wait compute nothing. Who has
        had events soon has one more; others may take until their ends.
        """
        steps = self._steps_to_release(self._num_free)
        if steps == NO_STEP:
            return True
        state, size = self._bounded(victim.request_id), self.manager.block_size
        had_events = state is not None and state.ordinal > 0
        lost = self._num_waiting if had_events else steps * (self._num_waiting + 1)
        lost += self._num_lost
        computed = victim.num_computed_tokens
        if lost >= PRICE * computed:
            return True
        if lost < PRICE * size or state is None or self._others.count:
            return False
        kept = min(self.manager.num_shared(victim.request_id), state.pinned)
        alone = self.manager.num_held(victim.request_id) - kept
        return alone >= missing and lost >= PRICE * max(computed - kept * size, size)

    @property
    def _num_free(self) -> int:
        """Superblocks that the request in turn may take."""
        return self.manager.num_free - self.manager.claimed

    def _may_take(self, request_id: str, num_tokens: int) -> bool:
        """Return whether what a request takes leaves enough for somebody to proceed."""
        needed = self.manager.num_needed(request_id, num_tokens)
        left = self._num_free - needed
        # An event that is due gives back at once.
        if needed <= 0 or left < 0:
            return needed <= 0
        if self.planner.due(request_id) is not None:
            return True
        return self._way(request_id)[0] - needed <= left or self._proceeds(left)

    def _most_missing(self, request_id: str) -> int:
        """Return at least what a request takes to its end; found without a search."""
        last = self.last[request_id] + self.manager.lookahead_tokens
        own = last // self.manager.block_size + 2
        beside = self._others.count * (last // self._others.block_size + 2)
        window = self.planner.states[request_id].footprint.window_blocks
        # Its first event takes anew what others hold, too.
        return 2 * own + beside + 2 * window

    def _fitting(self, request_id: str, computed: int, num_new: int) -> int:
        """Return for how many new tokens there are superblocks, at least 1."""
        size, free = self.manager.block_size, self._num_free
        spare = max(free - self.manager.num_needed(request_id, computed + 1), 0)
        # Other groups take as many each, or more where theirs are smaller.
        spare //= 1 + self._others.count * max(size // self._others.block_size, 1)
        first = computed + self.manager.lookahead_tokens
        count = min((first // size + 1 + spare) * size - first, num_new)
        # The window of the next event may not fit, too.
        fits = self.manager.num_needed(request_id, computed + count) <= free
        return count if fits else 1

    def _proceeds(self, free: int, leaving: frozenset[str] = NOBODY) -> bool:
        """Return whether somebody gets to where they give superblocks back."""
        return self._steps_to_release(free, leaving) < NO_STEP

    def _steps_to_release(self, free: int, leaving: frozenset[str] = NOBODY) -> int:
        """Return the steps in which somebody gets there; NO_STEP where nobody does."""
        step, num_events = self.forecast.step, self.planner.num_events
        now = step, num_events, self.manager.num_free, leaving
        if self._ways[0] != now:
            staying = self.forecast.bookings.keys() - leaving
            self._ways = now, [self._way(name) for name in staying]
        return min(
            (n for missing, n in self._ways[1] if missing <= free), default=NO_STEP
        )

    def _way(self, request_id: str) -> tuple[int, int]:
        """Return a request's superblocks, and steps, until its next event or end.

        Its first event takes superblocks in place of those that others hold, too.
        """
        state, manager = self.planner.states[request_id], self.manager
        request = self.running[request_id]
        # An answer may outlive what was expected.
        last = max(self.last[request_id], request.num_computed_tokens + 1)
        end = min(self.planner.coming_event(request_id), last)
        known = request.num_tokens + request.num_output_placeholders
        step = min(max(known - state.computed, 1), self.step_tokens)
        missing = manager.num_needed(request_id, end, step)
        if not (state.ordinal or state.due):
            shared = max(manager.num_shared(request_id) - state.pinned, 0)
            if shared and state.plan.is_called:
                own = state.footprint.frontier_blocks(end) - shared
                shared = min(max(state.num_dest(end) - own, 0), shared)
            missing += shared
        if end < last and state.is_uncalled:
            missing += state.footprint.window_blocks
            missing = min(missing, manager.num_needed(request_id, last, step))
        computed = request.num_computed_tokens
        in_prompt = max(min(known, end) - computed, 0)
        in_steps = -(-in_prompt // self.step_tokens) - in_prompt
        return missing, max(end - computed + in_steps, 0)

    def is_bounded(self, request_id: str) -> bool:
        """Return whether it is known what a request will hold."""
        return self._bounded(request_id) is not None

    def _bounded(self, request_id: str) -> RequestState | None:
        """Return the state of such a request, None for others."""
        state = self.planner.states.get(request_id)
        return None if state is None or state.footprint.keeps_all else state
