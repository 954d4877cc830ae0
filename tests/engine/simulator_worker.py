"""A worker without a model: storage that remembers which token lies in every slot.

Owns the physical side of the scheduler simulation. Each slot of each head holds
`incarnation * 2**20 + position`; a request gets a new incarnation number each time it
starts from nothing, so tokens of another request, or of the same one before its
preemption, are strangers. Any disagreement raises SimulationFailure.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvpolicy.block_manager.events import EventPlan, positions_up_to
from vllm_kvpolicy.protocol import CompactEvent, StepCommands, WindowCapture

NUM_HEADS = 4  # 2 layers x 2 KV heads, each with survivors of its own
STRIDE = 2**20
EMPTY = -1


class SimulationFailure(AssertionError):
    """The scheduler, its messages and the storage do not agree."""


def check(condition: Any, *context: Any) -> None:
    """Raise SimulationFailure with the context unless the condition holds."""
    if not condition:
        raise SimulationFailure(" ".join(str(item) for item in context))


@dataclass(frozen=True)
class Asked:
    """What a request asked for; `plan` is None where it wants the full KV cache."""

    prompt_len: int
    plan: EventPlan | None
    recent: int
    sinks: int


@dataclass
class Incarnation:
    """A request from its first token to its end or preemption."""

    asked: Asked
    number: int
    row: np.ndarray
    resumed: bool = False
    row_length: int = 0
    computed: int = 0
    frontier_blocks: int = 0
    global_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    survivors: np.ndarray = field(
        default_factory=lambda: np.empty((NUM_HEADS, 0), np.int64)
    )
    positions: list[int] = field(default_factory=list)

    @property
    def first_code(self) -> int:
        """Return the code of the token at position 0."""
        return self.number * STRIDE

    def extend(self, block_ids: Iterable[int]) -> None:
        """Append superblocks to the row, as vLLM's V1 runner does."""
        for block_id in block_ids:
            self.row[self.row_length] = block_id
            self.row_length += 1


class StorageWorker:
    """Executes scheduler outputs on integer storage and checks what attention reads.

    Args:
        num_blocks: superblocks of the pool, the null block included.
        block_size: N.
        max_row: most entries of a block table row.
        window_slots, window_tokens: of the query window pool.
        keeps_all: events permute and drop nothing.
        rng: draws survivors.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_row: int,
        window_slots: int,
        window_tokens: int,
        keeps_all: bool,
        rng: np.random.Generator,
    ) -> None:
        self.block_size = block_size
        self.max_row = max_row
        self.keeps_all = keeps_all
        self.rng = rng
        self.tokens = np.full((NUM_HEADS, num_blocks * block_size), EMPTY, np.int64)
        self.windows = np.full((window_slots, window_tokens), EMPTY, np.int64)
        self.live: dict[str, Incarnation] = {}
        self.known: dict[str, int] = {}
        self.num_incarnations = 0
        self.totals: Counter[str] = Counter()
        self.offsets = np.arange(block_size)

    def execute(self, output: Any, commands: StepCommands, asked: dict[str, Asked]):
        """Run one step as vLLM's worker does.

        Args:
            output: vLLM's SchedulerOutput.
            commands: the step's events and captures.
            asked: by request id; read for requests that start.

        Returns:
            Ids of the requests that sample a token in this step.
        """
        self.drop(output.finished_req_ids, forget=True)
        self.drop(output.preempted_req_ids or (), forget=False)
        for event in commands.events:
            self._run_event(event)
        self._update_rows(output, asked)
        scheduled = output.num_scheduled_tokens
        for request_id, count in scheduled.items():
            self._write(request_id, count)
        for capture in commands.captures:
            self._capture(capture, scheduled)
        self._check_positions(commands, scheduled)
        return [rid for rid, count in scheduled.items() if self._attend(rid, count)]

    # -- life of a request ------------------------------------------------------

    def drop(self, request_ids: Iterable[str], forget: bool) -> None:
        """Forget what requests hold; their superblocks may belong to others now."""
        for request_id in request_ids:
            state = self.live.pop(request_id, None)
            if forget:
                self.known.pop(request_id, None)
            if state is None:
                continue
            plan = state.asked.plan
            expected = positions_up_to(plan, state.computed) if plan else []
            check(state.positions == expected, "events", request_id, state.positions)
            local = state.row[state.frontier_blocks : state.row_length]
            self.tokens[:, state.global_slots] = EMPTY
            self.tokens[:, self._slots(local)] = EMPTY

    def _update_rows(self, output: Any, asked: dict[str, Asked]) -> None:
        for new in output.scheduled_new_reqs:
            check(new.req_id not in self.live, "twice new", new.req_id)
            self._start(new.req_id, asked[new.req_id], new.block_ids[0])
            self.known[new.req_id] = asked[new.req_id].prompt_len
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                check(request_id not in self.live, "resumed but held", request_id)
                self._start(request_id, asked[request_id], block_ids[0])
                self.live[request_id].resumed = True
            elif block_ids is not None:
                self.live[request_id].extend(block_ids[0])
            computed = cached.num_computed_tokens[index]
            check(computed == self.live[request_id].computed, "computed", request_id)

    def _start(self, request_id: str, asked: Asked, block_ids: list[int]) -> None:
        self.num_incarnations += 1
        row = np.zeros(self.max_row, np.int64)
        state = Incarnation(asked, self.num_incarnations, row)
        state.extend(block_ids)
        self.live[request_id] = state

    def _slots(self, block_ids: Any) -> np.ndarray:
        blocks = np.asarray(block_ids, dtype=np.int64)
        return (blocks[:, None] * self.block_size + self.offsets).ravel()

    # -- events -----------------------------------------------------------------

    def _run_event(self, event: CompactEvent) -> None:
        """Check an event against the rules, then choose and move survivors."""
        name, size = event.request_id, self.block_size
        state = self.live[name]
        asked, position = state.asked, event.position
        frontier = event.frontier_blocks * size
        check(position == state.computed, name, "event not at its position", event)
        check(event.ordinal == len(state.positions), name, "ordinal", event)
        expected = (position - asked.recent) // size * size
        check(frontier == expected, name, "wrong frontier", event)
        check(event.sinks == asked.sinks, name, "sinks", event)
        check(event.budget == asked.plan.budget, name, "budget", event)
        kept = len(event.dest_blocks) * size + position - frontier
        if self.keeps_all:
            check(kept == position, name, "keeps", kept, event)
        else:
            budget = asked.plan.budget
            check(budget <= kept < budget + size, name, "keeps", kept, event)
        check(0 not in event.dest_blocks + event.local_blocks, name, "null", event)
        check(len(set(event.dest_blocks)) == len(event.dest_blocks), name, event)
        source = self._slots(event.source_blocks)
        newly = np.arange(state.frontier_blocks * size, frontier)
        held = self._codes(state, newly)
        check(np.array_equal(self.tokens[:, source], held), name, "sources", event)
        local = self._slots(event.local_blocks)[: position - frontier]
        codes = state.first_code + np.arange(frontier, position)
        check((self.tokens[:, local] == codes).all(), name, "local", event)
        self._check_window(event, state)
        self._move(state, event, source, held)
        state.frontier_blocks = event.frontier_blocks
        state.positions.append(position)
        self.totals["events"] += 1
        self.totals["replayed events"] += state.resumed
        self.totals["events inside prompts"] += position < asked.prompt_len

    def _codes(self, state: Incarnation, local: np.ndarray) -> np.ndarray:
        """Return [heads, tokens]: what survivors and these local tokens should be."""
        tail = np.broadcast_to(local, (NUM_HEADS, len(local)))
        return state.first_code + np.concatenate([state.survivors, tail], axis=1)

    def _move(
        self, state: Incarnation, event: CompactEvent, source: np.ndarray, held: Any
    ) -> None:
        """Draw survivors that contain the sinks and write them to the destinations."""
        count = len(event.dest_blocks) * self.block_size
        check(count <= held.shape[1], event.request_id, "grows", event)
        if self.keeps_all:
            chosen = self.rng.permuted(held, axis=1)
        else:
            lottery = self.rng.random(held.shape)
            lottery[held < state.first_code + event.sinks] = 2.0
            order = np.argpartition(lottery, -count, axis=1)[:, -count:]
            chosen = np.take_along_axis(held, np.sort(order, axis=1), axis=1)
        sinks = (chosen < state.first_code + event.sinks).sum(axis=1)
        check((sinks == event.sinks).all(), event.request_id, "sinks lost", event)
        dest = self._slots(event.dest_blocks)
        self.tokens[:, source] = EMPTY  # the freed part is anybody's from here on
        self.tokens[:, dest] = chosen
        state.global_slots = dest
        state.survivors = chosen - state.first_code

    # -- windows ----------------------------------------------------------------

    def _check_window(self, event: CompactEvent, state: Incarnation) -> None:
        width = self.windows.shape[1]
        if not width:
            check(event.window_slot == -1, event.request_id, "window", event)
            return
        check(0 <= event.window_slot < len(self.windows), "window slot", event)
        expected = state.first_code + np.arange(event.position - width, event.position)
        rows = self.windows[event.window_slot]
        check(np.array_equal(rows, expected), "window", event, rows - expected)

    def _capture(self, capture: WindowCapture, scheduled: dict[str, int]) -> None:
        name, state = capture.request_id, self.live[capture.request_id]
        last_token = capture.first_token + capture.num_tokens
        last_row = capture.first_row + capture.num_tokens
        check(0 <= capture.window_slot < len(self.windows), name, "slot", capture)
        check(0 <= capture.first_token < last_token <= scheduled[name], name, capture)
        check(0 <= capture.first_row < last_row <= self.windows.shape[1], capture)
        codes = state.first_code + state.computed + np.arange(scheduled[name])
        rows = self.windows[capture.window_slot]
        rows[capture.first_row : last_row] = codes[capture.first_token : last_token]

    # -- the forward pass -----------------------------------------------------------

    def _write(self, request_id: str, count: int) -> None:
        """Write the step's tokens to vLLM's own slot mapping."""
        state, size = self.live[request_id], self.block_size
        end = state.computed + count
        check(end <= self.known[request_id], request_id, "token not known yet", end)
        check(state.row_length * size >= end, request_id, "no room for", end)
        position = np.arange(state.computed, end)
        blocks = state.row[position // size]
        check(blocks.all(), request_id, "writes to the null block at", position)
        slots = blocks * size + position % size
        self.tokens[:, slots] = state.first_code + position

    def _attend(self, request_id: str, count: int) -> bool:
        """Check every slot that attention reads; return whether a token is sampled."""
        state, size = self.live[request_id], self.block_size
        end, first = state.computed + count, state.frontier_blocks * size
        local_blocks = state.row[state.frontier_blocks : -(-end // size)]
        local = self._slots(local_blocks)[: end - first]
        slots = np.concatenate([state.global_slots, local])
        expected = self._codes(state, np.arange(first, end))
        found = self.tokens[:, slots]
        if not np.array_equal(found, expected):
            wrong = np.argwhere(found != expected)[:4]
            check(
                False,
                f"{request_id}: {len(wrong)}+ slots hold strangers, (head, index):",
                wrong.tolist(),
                [(found[tuple(w)], expected[tuple(w)]) for w in wrong],
            )
        check(0 not in local_blocks, request_id, "attends the null block")
        state.computed = end
        if end < self.known[request_id]:
            return False
        self.known[request_id] += 1
        return True

    def _check_positions(
        self, commands: StepCommands, scheduled: dict[str, int]
    ) -> None:
        """Check that no step runs across an event and none is missing."""
        with_event = {event.request_id for event in commands.events}
        check(len(with_event) == len(commands.events), "two events in a step", commands)
        check(with_event <= scheduled.keys(), "event without tokens", commands)
        for request_id, count in scheduled.items():
            state = self.live[request_id]
            if state.asked.plan is None:
                check(request_id not in with_event, request_id, "asked for none")
                continue
            start = state.computed
            due = state.asked.plan.next_event(start)
            has_event = request_id in with_event
            check(has_event or due != start, request_id, "event missing at", start)
            check(due == start or not has_event, request_id, "no event due at", start)
            following = state.asked.plan.next_event(start + 1)
            check(start + count <= following, request_id, "straddles", following)
