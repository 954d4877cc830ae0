"""Superblocks that layers with a sliding window hold, in groups that vLLM manages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm_kvpolicy.sizes import SlidingGroups


@dataclass(frozen=True)
class SlidingBlocks:
    """What requests hold beside the superblocks of a policy.

    Args:
        sizes: of the groups.
        managers: of vLLM, one for each group.
    """

    sizes: SlidingGroups
    managers: Sequence[Any] = ()

    def held(self, request_id: str) -> int:
        """Return the superblocks that a request holds; older entries are null."""
        rows = (each.req_to_blocks.get(request_id, ()) for each in self.managers)
        return sum(
            1
            for row in rows
            for _ in takewhile(lambda block: not block.is_null, reversed(row))
        )

    def needed(self, request_id: str, computed: int, num_tokens: int, step: int) -> int:
        """Return what a request takes more to get to `num_tokens`; negative for less.

        Args:
            request_id: the request.
            computed: its tokens computed so far.
            num_tokens: what it gets to.
            step: most tokens that it computes in a step on the way.
        """
        if not self.managers:
            return 0
        at_end = self.sizes.most_blocks(num_tokens, step)
        wanted = min(self.sizes.held(computed, num_tokens, step), at_end)
        return wanted - self.held(request_id)


NO_SLIDING = SlidingBlocks(SlidingGroups(0, 0, 0, 1, 1, 0))
