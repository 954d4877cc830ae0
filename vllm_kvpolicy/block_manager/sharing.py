"""Counts once in the forecast what several requests hold of one cached prefix.

Of those who hold it the one that entered first accounts for it, and when it ends, or
has an event that replaces it, the next.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvpolicy.block_manager.engine_state import EngineState
from vllm_kvpolicy.block_manager.forecast import HORIZON


class Shared(NamedTuple):
    """How many superblocks of a request's cached prefix others account for.

    Args:
        loose: of those that its first event replaces.
        until: step until which others do, unless that event is before.
        pinned: of those that no event touches.
        pinned_until: step until which others do.
    """

    loose: int = 0
    until: int = 0
    pinned: int = 0
    pinned_until: int = 0


ALONE = Shared()


@dataclass
class Sharing:
    """What others account for, of every request of an engine."""

    engine: EngineState
    by_request: dict[str, Shared] = field(default_factory=dict)

    def of(self, request_id: str) -> Shared:
        """Return what others account for of a request."""
        return self.by_request.get(request_id, ALONE)

    @property
    def has_any(self) -> bool:
        """Whether anything is shared in this step."""
        step = self.engine.forecast.step
        return any(
            each.loose * (each.until > step) + each.pinned * (each.pinned_until > step)
            for each in self.by_request.values()
        )

    def note_hit(
        self, request_id: str, blocks: Sequence[KVCacheBlock], leaving: frozenset[str]
    ) -> None:
        """Note how much of a waiting request's cached prefix others account for.

        Those who hold all of it do, until the last of them has its first event or ends;
        those who have pinned it until they end.

        Args:
            leaving: less urgent requests, on which it does not rely.
        """
        rows = (self.engine.manager.req_to_blocks.get(each, ()) for each in leaving)
        less = Counter(each.block_id for row in rows for each in row[: len(blocks)])
        num_shared = sum(each.ref_cnt > less[each.block_id] for each in blocks)
        state = self.engine.planner.states.get(request_id)
        pinned = min(num_shared, 0 if state is None else state.pinned)
        step = self.engine.forecast.step
        pinned_until = max(self._releases(blocks, pinned, leaving), default=step)
        until = step
        if num_shared > pinned:
            until = max(self._releases(blocks, num_shared, leaving), default=step)
        count = num_shared - pinned
        self.by_request[request_id] = Shared(count, until, pinned, pinned_until)

    def _releases(
        self, blocks: Sequence[KVCacheBlock], count: int, leaving: frozenset[str]
    ) -> list[int]:
        """Return the steps until which others hold the first `count` superblocks."""
        releases, engine, forecast = [], self.engine, self.engine.forecast
        for other in forecast.bookings.keys() - leaving if count else ():
            state = engine.planner.states[other]
            row = engine.manager.req_to_blocks.get(other, ())
            if len(row) < count or row[count - 1] is not blocks[count - 1]:
                continue
            end, has_event = state.first_event, state.ordinal > 0
            if state.pinned >= count or not (has_event or end < engine.last[other]):
                releases.append(forecast.bookings[other].end)
            elif not has_event:
                first = max(state.computed, engine.running[other].num_prompt_tokens)
                num_steps = max(end - first, 0) // (1 + engine.num_drafts)
                releases.append(forecast.step + num_steps)
        return releases

    def discount(self, request_id: str, step: int) -> int:
        """Return how many superblocks of a request others account for in a step."""
        shared = self.of(request_id)
        has_events = self.engine.planner.states[request_id].ordinal
        found = 0 if has_events or step >= shared.until else shared.loose
        return found + (shared.pinned if step < shared.pinned_until else 0)

    def pins(self, request_id: str) -> np.ndarray:
        """Return [S]: pinned superblocks that others account for, from this step on."""
        shared = self.of(request_id)
        steps = shared.pinned_until - self.engine.forecast.step if shared.pinned else 0
        return np.full(min(max(steps, 0), HORIZON), shared.pinned)

    def is_over(self, request_id: str) -> bool:
        """Return whether those who account for its prefix should have ended."""
        shared, step = self.of(request_id), self.engine.forecast.step
        has_events = self.engine.planner.states[request_id].ordinal > 0
        is_over = shared.pinned > 0 and step >= shared.pinned_until
        return is_over or (shared.loose > 0 and not has_events and step >= shared.until)

    def look_again(self, request_id: str) -> None:
        """Find anew until when others account for the prefix of a running request.

        Answers may be longer than expected. Who entered later accounts for nothing, and
        the first one is alone for good, as is one that has had an event with what is
        not pinned.
        """
        shared = self.of(request_id)
        if not (shared.loose or shared.pinned):
            return
        names, step = list(self.engine.running), self.engine.forecast.step
        later = frozenset(names[names.index(request_id) :])
        row = self.engine.manager.req_to_blocks[request_id]
        pins = self._releases(row, shared.pinned, later)
        rest: list[int] = []
        if shared.loose and not self.engine.planner.states[request_id].ordinal:
            rest = self._releases(row, shared.pinned + shared.loose, later)
        self.by_request[request_id] = Shared(
            shared.loose if rest else 0,
            max(rest, default=step),
            shared.pinned if pins else 0,
            max(pins, default=step),
        )
