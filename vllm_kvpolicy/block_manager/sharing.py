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
            is_pinned = state.pinned >= count
            if len(row) < count or row[count - 1] is not blocks[count - 1]:
                continue
            if is_pinned:
                releases.append(forecast.bookings[other].end)
            elif not state.ordinal:
                end = min(state.first_event, engine.last[other])
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
        """Return whether those who account for what it has pinned should have ended."""
        shared = self.of(request_id)
        return shared.pinned > 0 and self.engine.forecast.step >= shared.pinned_until

    def look_again(self, request_id: str) -> None:
        """Find anew until when others account for what a running request has pinned.

        Answers may be longer than expected. Who entered later accounts for nothing.
        """
        shared = self.of(request_id)
        if not shared.pinned:
            return
        names = list(self.engine.running)
        later = frozenset(names[names.index(request_id) :])
        row = self.engine.manager.req_to_blocks[request_id]
        releases = self._releases(row, shared.pinned, later)
        until = max(releases, default=self.engine.forecast.step)
        pinned = shared.pinned if releases else 0  # the first one is alone for good
        self.by_request[request_id] = Shared(shared.loose, shared.until, pinned, until)
