"""Plans events and query windows for every request of one engine; owns frontiers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from vllm_kvpolicy.block_manager.forecast import Course
from vllm_kvpolicy.events import NO_STEP, PHASE_BITS, Footprint
from vllm_kvpolicy.hints import NO_HINTS, Hints
from vllm_kvpolicy.protocol import (
    NO_COMMANDS,
    CompactEvent,
    StepCommands,
    UsedBlocks,
    WindowCapture,
)
from vllm_kvpolicy.sizes import PlannerLimits


@dataclass(frozen=True)
class RequestPlan:
    """When a request has events, and what they may read and must keep.

    Args:
        sinks: first tokens that are always kept.
        takes_hits: the prefix cache may give it its first tokens.
        budget: K as it was asked for, in tokens, to which the footprint adds what is
            pinned; None for a policy that takes no budget.
        num_drafts: speculated tokens that a step computes at most.
        is_called: events come when the scheduler calls for them, and only then; the
            budget is a floor. Otherwise their positions follow from the request alone.
        ceiling: C, tokens to which it is cut when it holds an interval more, of a
            request whose events are called for; None for no such events.
    """

    policy: str
    footprint: Footprint
    sinks: int
    takes_hits: bool = True
    budget: int | None = None
    num_drafts: int = 0
    is_called: bool = False
    ceiling: int | None = None
    hints: Hints = NO_HINTS

    @cached_property
    def first_event(self) -> int:
        """Position of the first event; until there, its KV is plain full attention."""
        return self.footprint.events.next_event(1)

    def usable_hit(self, num_cached: int) -> int:
        """Return how many cached tokens the request takes, in whole superblocks.

        It computes the queries that its first event reads, and one token before them,
        so that it can always begin without a query window. For example, with N = 16, a
        first event at 100 and a window of 32, no more than 64 tokens come from the
        cache. Where vLLM speculates, a request that begins with its last known token
        computes as many drafts as any other, which therefore end at the event, too.

        Args:
            num_cached: tokens of its prefix that are cached, in whole superblocks.
        """
        most = self.cached_before(self.first_event) if self.takes_hits else 0
        return min(most, num_cached)

    @property
    def before_event(self) -> int:
        """Tokens computed before an event, at least: queries to read, or drafts."""
        return max(self.footprint.window_tokens, self.num_drafts)

    def cached_before(self, first_event: int) -> int:
        """Return how many tokens may be cached if the first event comes there."""
        block_size = self.footprint.block_size
        last = first_event - self.before_event - 1
        return max(last // block_size * block_size, 0)


@dataclass(frozen=True)
class Call:
    """An event that the scheduler has called for.

    Args:
        position: of the event, at or after what is computed.
        budget: tokens per KV head that it leaves.
    """

    position: int
    budget: int


@dataclass
class RequestState:
    """Progress of one request: its frontier, its next event, its query window.

    Args:
        computed: tokens computed before this step.
        target: the next event position, at or after `computed`.
        frontier_blocks: current F / N.
        global_blocks: superblocks before the frontier, from the first event on: the
            pinned ones and those that hold survivors.
        ordinal: events since the request (re)started.
        window: superblocks of its query window; none where it is not open.
        due: an event decided in this step that the manager has yet to carry out.
        serial: number of the last event, -1 before the first.
        passed: position of the last event, -1 before the first.
        first_passed: position of the first event, -1 before it.
        call: the event that has been called for, until it has run.
        inside: first and last + 1 of the positions at which it has the events of its
            plan, because what it begins with does not fit whole: a prompt, or a prompt
            and an answer that are computed again. None for none.
        most_held: most superblocks held just before some were given back.
        dropped: by serial, the position of each event, how many tokens had been
            dropped after it, per KV head, mean over layers and heads, and its budget.
            Of an event whose answer is under way, those that were certain to be.
        earlier: the same of its events before it was preempted, if it was.
    """

    plan: RequestPlan
    computed: int = 0
    target: int = -1
    frontier_blocks: int = 0
    global_blocks: int = 0
    ordinal: int = 0
    window: tuple[int, ...] = ()
    due: bool = False
    serial: int = -1
    passed: int = -1
    first_passed: int = -1
    call: Call | None = None
    inside: tuple[int, int] | None = None
    most_held: int = 0
    dropped: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    earlier: tuple[tuple[int, float, int], ...] = ()

    @property
    def footprint(self) -> Footprint:
        """When the request has events and what it holds between them."""
        return self.plan.footprint

    def usable_hit(self, num_cached: int) -> int:
        """Return how many cached tokens it takes.

        All, if its events are called for. But where it was let in with events of its
        own and found no superblock, those before the first of these, whose window may
        take more than the pool has if it comes behind a long hit.
        """
        is_free = self.plan.is_called and self.inside is None
        takes_all = is_free and self.plan.takes_hits
        return num_cached if takes_all else self.plan.usable_hit(num_cached)

    def next_event(self, position: int) -> int:
        """Return the first event position >= `position`; NO_STEP for none known."""
        events = self.footprint.events
        if not self.plan.is_called:
            return events.next_event(position)
        found = NO_STEP
        if self.inside is not None:
            first, end = self.inside
            found = events.next_event(max(position, first))
            found = found if found < end else NO_STEP
        if self.call is not None and self.call.position >= position:
            return min(found, self.call.position)
        return found

    @property
    def first_event(self) -> int:
        """Position of the first event, as far as it is known."""
        if not self.plan.is_called:
            return self.plan.first_event
        return self.first_passed if self.ordinal else self.next_event(0)

    @property
    def is_uncalled(self) -> bool:
        """Whether events are called for and none is known to come."""
        return self.plan.is_called and self.next_event(self.computed) == NO_STEP

    @property
    def spacing(self) -> int:
        """Fewest tokens between two called events, and that one drops."""
        events, size = self.footprint.events, self.footprint.block_size
        least = max(events.interval // 4, 2 * events.window_tokens, size)
        return min(least, events.interval)

    @property
    def soonest_call(self) -> int:
        """First position at which an event can be called for.

        Its window has to fill, and drafts of the last step may lie before it.
        """
        soonest = self.computed + self.plan.before_event
        return max(soonest, self.passed + self.spacing) if self.ordinal else soonest

    @property
    def soonest_release(self) -> int:
        """First position at which a call gives superblocks back for sure."""
        footprint = self.footprint
        # Tokens held there; of fewer, all may be kept in as many superblocks.
        least = footprint.events.budget + max(self.spacing, footprint.block_size)
        return max(self.soonest_call, self.dropped_tokens + least)

    @property
    def ceiling_event(self) -> int:
        """Position at which it holds C + I, or its prompt ends; NO_STEP without C.

        The first of them comes earlier by its phase's share of an interval.
        """
        if self.plan.ceiling is None:
            return NO_STEP
        events = self.footprint.events
        early = 0 if self.ordinal else events.phase * events.interval >> PHASE_BITS
        held = self.plan.ceiling + events.interval - early
        return max(self.dropped_tokens + held, events.prompt_len, self.soonest_call)

    def budget_at(self, position: int) -> int:
        """Return the tokens per KV head that an event leaves."""
        if self.call is not None and self.call.position == position:
            return self.call.budget
        return self.footprint.events.budget

    def num_dest(self, position: int) -> int:
        """Return the superblocks before the frontier after an event, at most."""
        return self.footprint.global_blocks(position, self.budget_at(position))

    @property
    def pinned(self) -> int:
        """First superblocks, which no event touches."""
        return self.plan.footprint.pinned

    @property
    def pinned_tokens(self) -> int:
        """Tokens in them."""
        return self.pinned * self.footprint.block_size

    @property
    def num_survivors(self) -> int:
        """Superblocks that hold survivors of an event."""
        return max(self.global_blocks - self.pinned, 0)

    def course(self) -> Course:
        """Return the events that are known to come, of a request that is called."""
        frontiers, kept = [self.frontier_blocks], [self.global_blocks]
        events = [self.next_event(max(self.computed, self.passed + 1))]
        while events[-1] < NO_STEP:
            frontiers.append(self.footprint.frontier_blocks(events[-1]))
            kept.append(self.num_dest(events[-1]))
            events.append(self.next_event(events[-1] + 1))
        return Course(tuple(events), tuple(frontiers), tuple(kept))

    @property
    def window_start(self) -> int:
        """Position of the first query that the event after this position reads."""
        target = self.target
        if target <= self.computed:
            target = self.next_event(self.computed + 1)
        return target - self.footprint.window_tokens

    @property
    def dropped_tokens(self) -> int:
        """Tokens per KV head that the events so far have dropped."""
        return self.dropped_blocks * self.footprint.block_size

    @property
    def dropped_blocks(self) -> int:
        """Superblocks that they have given back."""
        return self.frontier_blocks - self.global_blocks

    @property
    def is_uncut(self) -> bool:
        """Whether it has had no event, before a preemption either."""
        return not (self.dropped or self.earlier)

    def note_dropped(self, used: UsedBlocks) -> None:
        """Note what one of the request's events has dropped, later events or not."""
        position, certain, budget = self.dropped[used.serial]
        behind = self.footprint.frontier_blocks(position) - self.pinned
        dropped = (behind - used.num_blocks + used.slack) * self.footprint.block_size
        self.dropped[used.serial] = position, max(dropped, certain), budget


@dataclass
class Planner:
    """Decides per step which requests have an event and how far each may compute.

    Args:
        states: requests by id, from arrival to finish.
        num_global_blocks: superblocks that hold survivors, over all requests.
    """

    limits: PlannerLimits
    states: dict[str, RequestState] = field(default_factory=dict)
    num_global_blocks: int = 0
    _windows: dict[str, RequestState] = field(default_factory=dict)
    _events: dict[str, CompactEvent] = field(default_factory=dict)
    _num_due: int = 0
    num_events: int = 0
    # Requests whose event waits for a step with room, longest first, and those of them
    # that the next step has room for.
    _late: dict[str, None] = field(default_factory=dict)
    _invited: frozenset[str] = frozenset()

    # -- life of a request ------------------------------------------------------

    def add(self, request_id: str, plan: RequestPlan) -> None:
        """Start planning for a request; it holds nothing yet."""
        self.states[request_id] = RequestState(plan)

    def restart(self, request_id: str) -> None:
        """Forget what a preempted request held; its event positions stay the same."""
        state = self.states.get(request_id)
        if state is None:
            return
        self._windows.pop(request_id, None)
        undone = self._events.pop(request_id, None)
        if undone is not None:  # of this step, in which the request no longer runs
            del state.dropped[undone.serial]
        self._late.pop(request_id, None)
        self.num_global_blocks -= state.num_survivors
        earlier = *state.earlier, *state.dropped.values()
        self.states[request_id] = RequestState(state.plan, earlier=earlier)

    def remove(self, request_id: str) -> None:
        """Forget a finished or aborted request."""
        self.restart(request_id)
        self.states.pop(request_id, None)

    def plan_inside(self, request_id: str, inside: tuple[int, int] | None) -> None:
        """Give a request that enters the events of its plan there, or none."""
        state = self.states[request_id]
        state.inside = inside
        state.target = state.next_event(state.computed)

    def call(self, request_id: str, call: Call) -> None:
        """Have an event of a request whose events are called for."""
        state = self.states[request_id]
        state.call = call
        state.target = state.next_event(max(state.computed, state.passed + 1))

    # -- while vLLM schedules ----------------------------------------------

    def clip(
        self, request_id: str, computed: int, num_new: int, is_verified: bool = True
    ) -> int:
        """Return how many of `num_new` tokens the request may compute in this step.

        Never past the next event, drafts included: what is computed behind it attends
        to what it keeps, so that drafts do not change it. 0 means the request sits this
        step out, because the step has its share of events, or because it comes to the
        queries that the event reads, or to the event, with drafts under way that may be
        rejected.

        Args:
            is_verified: `computed` is sure; else some of it may be rejected.
        """
        state = self.states.get(request_id)
        if state is None or num_new <= 0:
            return num_new
        state.computed, state.due = computed, False
        if state.target < computed:
            state.target = state.next_event(computed)
        target = state.target
        first_query = target - state.footprint.window_tokens
        if not is_verified and computed + num_new > first_query:
            return 0
        if target == computed:
            if not self._has_room_for(request_id):
                return 0
            target = state.next_event(computed + 1)
            state.due = True
        return min(num_new, target - computed)

    def sit_out(self, request_id: str) -> None:
        """Take back what `clip` has decided: the request does not run in this step.

        Its event had its place in the step, which others may have now.
        """
        state = self.states.get(request_id)
        if state is not None and state.due:
            state.due = False
            self._num_due -= request_id not in self._invited
            self._invited -= {request_id}
            self._late.pop(request_id, None)

    def due(self, request_id: str) -> RequestState | None:
        """Return the request's state if it has an event in this step, else None."""
        state = self.states.get(request_id)
        return state if state is not None and state.due else None

    def coming_event(self, request_id: str) -> int:
        """Return the position of a request's next event that may give superblocks back.

        An event that had its place in a step, and has not run for want of superblocks,
        gives back fewer than the request takes: the one after it counts. One that still
        waits for a place may give some back, and counts itself.
        """
        state = self.states[request_id]
        event = state.next_event(max(state.computed, state.passed + 1))
        if event == state.computed and request_id not in self._late:
            event = state.next_event(event + 1)
        return state.soonest_release if state.is_uncalled else event

    def record(
        self,
        request_id: str,
        source_blocks: tuple[int, ...],
        dest_blocks: tuple[int, ...],
        local_blocks: tuple[int, ...],
        pinned_blocks: tuple[int, ...] = (),
    ) -> None:
        """Note the event that the manager has just carried out on its block list."""
        state = self.states[request_id]
        position = state.passed = state.computed
        budget = state.budget_at(position) - state.pinned_tokens
        if not state.ordinal:
            state.first_passed = position
        state.due = False
        held = pinned_blocks, source_blocks, local_blocks, state.window
        self.note_held(request_id, sum(map(len, held)))
        state.frontier_blocks = state.footprint.frontier_blocks(position)
        num_global = state.num_survivors
        self.num_global_blocks += len(dest_blocks) - num_global
        state.global_blocks = state.pinned + len(dest_blocks)
        state.serial = self.num_events
        state.dropped[state.serial] = position, state.dropped_tokens, budget
        self.num_events += 1
        self._events[request_id] = CompactEvent(
            request_id=request_id,
            serial=state.serial,
            policy=state.plan.policy,
            ordinal=state.ordinal,
            position=position,
            frontier_blocks=state.frontier_blocks,
            budget=budget,
            sinks=max(state.plan.sinks - state.pinned_tokens, 0),
            prompt_tokens=state.footprint.events.prompt_len,
            num_global=num_global,
            pinned_blocks=pinned_blocks,
            source_blocks=source_blocks,
            dest_blocks=dest_blocks,
            local_blocks=local_blocks,
            window_blocks=state.window,
            hints=state.plan.hints,
        )
        state.ordinal += 1
        if state.call is not None and state.call.position <= position:
            state.call = None
        self._windows.pop(request_id, None)
        state.window = ()

    def dropped_tokens(self, request_ids: Sequence[str]) -> list[int]:
        """Return the tokens per KV head that each request's events have dropped."""
        states = map(self.states.get, request_ids)
        return [0 if state is None else state.dropped_tokens for state in states]

    def note_held(self, request_id: str, num_blocks: int) -> None:
        """Note what a request holds where that is about to shrink, in superblocks."""
        state = self.states.get(request_id)
        if state is not None:
            state.most_held = max(state.most_held, num_blocks)

    def surplus(self, used: UsedBlocks) -> tuple[int, int] | None:
        """Take the superblocks that an event did not need off the request's count.

        After a later event they can no longer be given back; the answer then says only
        what the event has dropped.

        Args:
            used: the worker's answer, maybe late: the request may have finished,
                started again, or had another event since.

        Returns:
            First and last + 1 of their entries in its block list, for the manager to
            free; None where there is nothing to give back.
        """
        state = self.states.get(used.request_id)
        if state is None or used.serial not in state.dropped:
            return None
        state.note_dropped(used)
        first, last = state.pinned + used.num_blocks, state.global_blocks
        if state.serial != used.serial or first >= last:
            return None
        state.global_blocks = first
        self.num_global_blocks -= last - first
        return first, last

    def finish_step(self, num_scheduled: Mapping[str, int]) -> StepCommands:
        """Return the step's commands and get ready for the next step.

        Args:
            num_scheduled: tokens per request that vLLM really scheduled; events of
                requests that were preempted after their event are already forgotten.
        """
        if not (self._windows or self._events or self._late):
            self._invited, self._num_due = frozenset(), 0
            return NO_COMMANDS
        captures = []
        for request_id, state in self._windows.items():
            first = max(state.computed, state.window_start)
            end = state.computed + num_scheduled.get(request_id, 0)
            # Drafts that were rejected may have opened it too early.
            if end > first:
                captures.append(
                    WindowCapture(
                        request_id=request_id,
                        window_blocks=state.window,
                        first_token=first - state.computed,
                        first_row=first - state.window_start,
                        num_tokens=end - first,
                    )
                )
        missing = self._events.keys() - num_scheduled.keys()
        if missing:
            raise RuntimeError(
                f"requests {sorted(missing)} had an event in a step that does not run "
                "them; their superblocks are lost"
            )
        commands = StepCommands(tuple(self._events.values()), tuple(captures))
        for request_id in self._events:
            self._late.pop(request_id, None)
        self._invited = frozenset(islice(self._late, self.limits.events_per_step))
        self._events = {}
        self._num_due = 0
        return commands

    def peak_blocks(
        self, request_id: str, num_tokens: int, num_shared: int = 0
    ) -> int | None:
        """Return the most superblocks the request holds up to `num_tokens` tokens.

        None without a policy; for `num_shared` see `Footprint.peak_blocks`.
        """
        state = self.states.get(request_id)
        if state is None:
            return None
        if state.plan.is_called and state.inside is None:
            return int(state.footprint.blocks(num_tokens)) - num_shared
        return state.footprint.peak_blocks(num_tokens, num_shared)

    def _has_room_for(self, request_id: str) -> bool:
        """Return whether this step may carry the request's event.

        Requests that have waited longest are invited; others get what those leave, so
        that neither the order in which vLLM visits requests nor their priorities starve
        anybody.
        """
        if request_id in self._invited:
            return True
        if self._num_due + len(self._invited) >= self.limits.events_per_step:
            self._late[request_id] = None
            return False
        self._num_due += 1
        return True

    # -- query windows ------------------------------------------------------------

    def needs_window(self, request_id: str, num_tokens: int) -> bool:
        """Return whether this step saves queries and no superblocks are there for them.

        In the step of an event the open window is read; the next one is another.

        Args:
            num_tokens: tokens computed after this step.
        """
        state = self.states.get(request_id)
        if state is None or state.window:
            return False
        return num_tokens > state.window_start

    def lend_window(self, request_id: str, blocks: tuple[int, ...]) -> None:
        """Note the superblocks that the manager has lent for a request's queries."""
        state = self.states[request_id]
        state.window = blocks
        self._windows[request_id] = state
