"""A worker without a model: storage that remembers which token lies in every slot.

Owns the physical side of the scheduler simulation. Each slot of each page holds
`incarnation * 2**20 + position`; a request gets a new incarnation number each time it
starts from nothing, so tokens of another request, or of the same one before its
preemption, are strangers. With prefix caching it holds a code of all tokens up to it,
so that requests may read what others computed for the same prefix and salt, and nothing
else. Any disagreement raises SimulationFailure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from support.engine.simulator_pages import (
    EMPTY,
    NEVER,
    NUM_HEADS,
    Asked,
    Incarnation,
    Lists,
    check,
    draw_pages,
    draw_quota,
    draw_survivors,
    own_pages,
    slots_of,
)
from vllm_kvpolicy.protocol import CompactEvent, StepCommands, UsedBlocks, WindowCapture


class StorageWorker:
    """Executes scheduler outputs on integer storage and checks what attention reads.

    Args:
        num_blocks: superblocks of the pool, the null block included.
        block_size: N.
        max_row: most entries of a block table row.
        group_size: G, query heads per KV head.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_row: int,
        group_size: int,
        rng: np.random.Generator,
    ) -> None:
        self.block_size = block_size
        self.max_row = max_row
        self.rng = rng
        self.tokens = np.full(num_blocks * NUM_HEADS * block_size, EMPTY, np.int64)
        self.group_size = group_size
        self.live: dict[str, Incarnation] = {}
        self.known: dict[str, int] = {}
        self.num_incarnations = 0
        self.totals: Counter[str] = Counter()
        self.cached = np.empty(0, np.int64)

    def execute(
        self,
        output: Any,
        commands: StepCommands,
        asked: dict[str, Asked],
        cached: np.ndarray,
    ) -> tuple[dict[str, int], list[UsedBlocks]]:
        """Run one step as vLLM's worker does.

        How many drafts are accepted is drawn; the others leave wrong tokens behind.

        Args:
            asked: by request id; read for requests that start.
            cached: superblocks in the prefix cache when the step had been scheduled.

        Returns:
            How many tokens requests sample in this step, and answers to events.
        """
        self._keep(cached, commands.events)
        self.drop(output.finished_req_ids, forget=True)
        self.drop(output.preempted_req_ids or (), forget=False)
        answers = []
        for number, event in enumerate(commands.events, start=1):
            self._keep(cached, commands.events[number:])
            answers += self._run_event(event)
        self._update_rows(output, asked)
        zeroed = own_pages(output.new_block_ids_to_zero or [])
        self.tokens[slots_of(zeroed.flatten(), self.block_size)] = EMPTY
        scheduled = output.num_scheduled_tokens
        for request_id, count in scheduled.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, ())
            self._write(request_id, count, drafts)
        for capture in commands.captures:
            self._capture(capture, scheduled)
        self._check_positions(commands, scheduled)
        sampled = {rid: self._attend(rid, count) for rid, count in scheduled.items()}
        return sampled, answers

    def _keep(self, cached: np.ndarray, events: Iterable[CompactEvent]) -> None:
        """Empty nothing that is cached, or that events have yet to read.

        Allocations at the end of a step may take out of the cache what its events read.
        """
        read = [
            block
            for event in events
            for block in event.source_blocks + event.window_blocks
        ]
        self.cached = np.union1d(cached, np.array(read, np.int64))

    # -- life of a request ------------------------------------------------------

    def drop(self, request_ids: Iterable[str], forget: bool) -> None:
        """Forget what requests hold; their superblocks may belong to others now."""
        for request_id in request_ids:
            state = self.live.pop(request_id, None)
            if forget:
                self.known.pop(request_id, None)
            if state is None:
                continue
            asked, expected = state.asked, list[int]()
            if asked.plan is not None:
                expected = asked.plan.positions_up_to(state.computed)
            is_right = asked.is_called or state.positions == expected
            check(is_right, "events", request_id, state.positions)
            local = state.row[state.frontier_blocks : state.row_length]
            local = np.concatenate([state.pins, local])
            window = own_pages(state.window)
            for pages in (np.concatenate(state.pages), own_pages(local), window):
                self._clear(pages)

    def _clear(self, pages: np.ndarray) -> None:
        """Empty pages that nobody may read any more, so not those of cached blocks."""
        pages = pages[~np.isin(pages // NUM_HEADS, self.cached)]
        self.tokens[slots_of(pages, self.block_size)] = EMPTY

    def _update_rows(self, output: Any, asked: dict[str, Asked]) -> None:
        for new in output.scheduled_new_reqs:
            check(new.req_id not in self.live, "twice new", new.req_id)
            hit = new.num_computed_tokens
            self._start(new.req_id, asked[new.req_id], new.block_ids[0], hit)
            self.known[new.req_id] = asked[new.req_id].prompt_len
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[index]
            computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                check(request_id not in self.live, "resumed but held", request_id)
                self._start(request_id, asked[request_id], block_ids[0], computed)
                self.live[request_id].resumed = True
                # A reset drops what was sampled in steps under way.
                num_output = cached.num_output_tokens[index]
                self.known[request_id] = asked[request_id].prompt_len + num_output
            elif block_ids is not None:
                self.live[request_id].extend(block_ids[0])
            check(computed == self.live[request_id].computed, "computed", request_id)

    def _start(
        self, request_id: str, asked: Asked, block_ids: list[int], hit: int
    ) -> None:
        self.num_incarnations += 1
        row = np.zeros(self.max_row, np.int64)
        state = Incarnation(asked, self.num_incarnations, row)
        state.extend(block_ids)
        self.live[request_id] = state
        if not hit:
            return
        check(asked.codes is not None, request_id, "hit without a cache", hit)
        state.computed = hit
        self.totals["hits"] += 1
        self.totals["hit tokens"] += hit
        if asked.plan is not None and not asked.is_called:
            last = asked.plan.next_event(1) - asked.window
            check(hit <= last, request_id, "hit", hit, "reaches into the window", last)
            check(hit < asked.plan.next_event(1), request_id, "hit past the event", hit)

    # -- events -----------------------------------------------------------------

    def _run_event(self, event: CompactEvent) -> list[UsedBlocks]:
        """Check an event against the rules, then choose and move survivors."""
        name, size = event.request_id, self.block_size
        check(name in self.live, name, "event before its first token", event)
        state = self.live[name]
        asked, position = state.asked, event.position
        frontier = event.frontier_blocks * size
        check(position == state.computed, name, "event not at its position", event)
        check(event.ordinal == len(state.positions), name, "ordinal", event)
        expected = (position - asked.recent) // size * size
        check(frontier == expected, name, "wrong frontier", event)
        check(event.policy == asked.policy, name, "policy", event)
        pins = asked.pinned * size
        check(event.sinks == max(asked.sinks - pins, 0), name, "sinks", event)
        floor = asked.plan.budget - pins
        is_right = event.budget == floor or asked.is_called and event.budget > floor
        check(is_right, name, "budget", event)
        self.totals["events above the floor"] += event.budget > floor
        self._check_blocks(state, event)
        first = state.frontier_blocks * size if event.ordinal else pins
        newly = np.arange(first, frontier)
        leaving = own_pages(event.leaving_blocks)
        pages = [
            np.concatenate([old, new])
            for old, new in zip(state.pages, leaving, strict=True)
        ]
        held = state.held(newly)
        self._check_tokens(state, pages, held, name, "sources", event)
        local = own_pages(event.local_blocks)
        above = [np.arange(frontier, position)] * NUM_HEADS
        self._check_tokens(state, list(local), above, name, "local", event)
        self._check_window(event, state)
        self._move(state, event, pages, held)
        state.frontier_blocks = event.frontier_blocks
        state.positions.append(position)
        self.totals["events"] += 1
        self.totals["replayed events"] += state.resumed
        self.totals["events inside prompts"] += position < asked.prompt_len
        if not asked.is_dynamic:
            return []
        return [UsedBlocks(name, event.serial, state.num_used)]

    def _check_blocks(self, state: Incarnation, event: CompactEvent) -> None:
        """Check how many superblocks an event has, and that they are the right ones."""
        name, size, asked = event.request_id, self.block_size, state.asked
        num_local = event.position - event.frontier_blocks * size
        kept = len(event.dest_blocks) * size + num_local
        budget = event.budget
        if asked.keeps_all:
            # Where answers have been heard, what is left goes to as many superblocks.
            behind = event.frontier_blocks - asked.pinned
            whole = min(behind, len(event.source_blocks))
            check(len(event.dest_blocks) == whole, name, "keeps", kept, event)
            kept += asked.pinned * size
            check(asked.is_dynamic or kept == event.position, name, "keeps", event)
        elif asked.is_dynamic and len(event.dest_blocks) == len(event.source_blocks):
            check(kept < budget + size, name, "keeps", kept, event)
        else:
            check(budget <= kept < budget + size, name, "keeps", kept, event)
        check(0 not in event.dest_blocks + event.local_blocks, name, "null", event)
        check(len(set(event.dest_blocks)) == len(event.dest_blocks), name, event)
        # The scheduler may or may not have heard what the last event left over.
        known = event.num_global
        check(known in (len(state.dest_blocks), state.num_used), name, "trimmed", event)
        first = state.frontier_blocks if event.ordinal else asked.pinned
        old = tuple(state.row[first : event.frontier_blocks].tolist())
        pins = tuple(state.row[: asked.pinned].tolist())
        check(event.pinned_blocks == pins, name, "pins", event, pins)
        self.totals["events behind pins"] += bool(pins)
        sources = state.dest_blocks[:known] + old
        check(event.source_blocks == sources, name, "sources", event, sources)

    def _check_tokens(
        self, state: Incarnation, pages: Lists, positions: Lists, *context: Any
    ) -> None:
        """Check that page lists hold these positions, one list behind the other."""
        slots = [
            slots_of(own, self.block_size)[: len(tokens)]
            for own, tokens in zip(pages, positions, strict=True)
        ]
        found = self.tokens[np.concatenate(slots)]
        expected = state.codes(np.concatenate(positions))
        if not np.array_equal(found, expected):
            wrong = np.flatnonzero(found != expected)
            pairs = [(int(found[w]), int(expected[w])) for w in wrong[:4]]
            check(False, *context, f"{len(wrong)} slots hold strangers", pairs)

    def _move(
        self, state: Incarnation, event: CompactEvent, pages: Lists, held: Lists
    ) -> None:
        """Draw survivors that contain the sinks and write them to the destinations."""
        asked, size, dest = state.asked, self.block_size, event.dest_blocks
        counts = [len(own) for own in pages]
        check(len(dest) <= len(event.source_blocks), event.request_id, "grows", event)
        quota = draw_quota(asked, counts, len(dest), size, self.rng)
        chosen = draw_survivors(asked, held, quota, size, self.rng)
        for tokens in chosen:
            sinks = (tokens < asked.sinks).sum()
            check(sinks == event.sinks, event.request_id, "sinks lost", event)
        # What is freed is anybody's from here on.
        self._clear(own_pages(event.source_blocks))
        state.pages = draw_pages(asked, dest, quota, self.rng)
        slots = slots_of(np.concatenate(state.pages), size)
        self.tokens[slots] = state.codes(np.concatenate(chosen))
        state.survivors = chosen
        state.dest_blocks, state.num_used = dest, -(-sum(quota) // NUM_HEADS)
        self.totals["uneven events"] += len(set(quota)) > 1
        self.totals["events with surplus"] += state.num_used < len(dest)

    # -- windows ----------------------------------------------------------------

    def _check_window(self, event: CompactEvent, state: Incarnation) -> None:
        width = state.asked.window
        check(event.window_blocks == state.window, event.request_id, "window", event)
        if not width:
            return
        expected = state.codes(np.arange(event.position - width, event.position))
        rows = self.tokens[self._window_slots(state.window, np.arange(width))]
        check(np.array_equal(rows, expected), "window", event, rows - expected)
        self._clear(own_pages(state.window))
        state.window = ()

    def _capture(self, capture: WindowCapture, scheduled: dict[str, int]) -> None:
        name, state = capture.request_id, self.live[capture.request_id]
        last_token = capture.first_token + capture.num_tokens
        last_row = capture.first_row + capture.num_tokens
        blocks = capture.window_blocks
        check(len(blocks) == state.asked.window_blocks, name, "window", capture)
        check(state.window in ((), blocks), name, "moved window", capture)
        check(0 <= capture.first_token < last_token <= scheduled[name], name, capture)
        check(0 <= capture.first_row < last_row <= state.asked.window, capture)
        codes = state.codes(state.computed + np.arange(scheduled[name]))
        state.window = blocks
        rows = np.arange(capture.first_row, last_row)
        slots = self._window_slots(blocks, rows)
        self.tokens[slots] = codes[capture.first_token : last_token]

    def _window_slots(self, blocks: tuple[int, ...], rows: np.ndarray) -> np.ndarray:
        """Return the slots of rows of a window; a row takes G of 2N places."""
        per_block, part = 2 * self.block_size, rows * self.group_size
        first = own_pages(np.array(blocks)[part // per_block])[0] * self.block_size
        return first + part % per_block

    # -- the forward pass -----------------------------------------------------------

    def _write(self, request_id: str, count: int, drafts: Sequence[int]) -> None:
        """Write the step's tokens to vLLM's own slot mapping."""
        state, size = self.live[request_id], self.block_size
        end = state.computed + count
        known = self.known[request_id] + len(drafts)
        check(end <= known, request_id, "token not known yet", end)
        if len(drafts):
            is_padding = drafts[0] < 0  # vLLM's, to make a step uniform
            most = 0 if is_padding else len(drafts)
            accepted = int(self.rng.integers(0, most + 1))
            state.rejected = self.known[request_id] + accepted
            self.totals["drafts"] += len(drafts)
            self.totals["drafts accepted"] += accepted
            self.totals["drafts of padding"] += is_padding
        check(state.row_length * size >= end, request_id, "no room for", end)
        position = np.arange(state.computed, end)
        blocks = state.row[position // size]
        check(blocks.all(), request_id, "writes to the null block at", position)
        slots = own_pages(blocks) * size + position % size
        self.tokens[slots] = state.codes(position)

    def _attend(self, request_id: str, count: int) -> int:
        """Check every slot that attention reads; return how many tokens are sampled."""
        state, size = self.live[request_id], self.block_size
        end, first = state.computed + count, state.frontier_blocks * size
        local_blocks = state.row[state.frontier_blocks : -(-end // size)]
        pins, local = own_pages(state.pins), own_pages(local_blocks)
        pages = [
            np.concatenate(each) for each in zip(pins, state.pages, local, strict=True)
        ]
        pinned = np.arange(len(state.pins) * size)
        held = state.held(np.arange(first, end))
        held = [np.concatenate([pinned, each]) for each in held]
        self._check_tokens(state, pages, held, request_id, "attends")
        check(0 not in local_blocks, request_id, "attends the null block")
        known, state.computed = self.known[request_id], min(end, state.rejected)
        state.rejected = NEVER
        if end < known:
            return 0
        self.known[request_id] = state.computed + 1
        return state.computed + 1 - known

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
            if state.asked.is_called:
                continue
            start = state.computed
            due = state.asked.plan.next_event(start)
            has_event = request_id in with_event
            check(has_event or due != start, request_id, "event missing at", start)
            check(due == start or not has_event, request_id, "no event due at", start)
            following = state.asked.plan.next_event(start + 1)
            check(start + count <= following, request_id, "straddles", following)
