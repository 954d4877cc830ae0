"""Superblocks that layers with a sliding window hold, in groups that vLLM manages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    def _newest(self, request_id: str) -> Iterator[tuple[int, Any]]:
        """Yield a request's superblocks, newest first, and their places in its rows."""
        for manager in self.managers:
            row = manager.req_to_blocks.get(request_id, ())
            for index in reversed(range(len(row))):
                if row[index].is_null:  # so are all older ones
                    break
                yield index, row[index]

    def held(self, request_id: str) -> int:
        """Return the superblocks that a request holds."""
        return sum(1 for _ in self._newest(request_id))

    def held_by(self, request_ids: Iterable[str]) -> int:
        """Return what requests hold together; shared superblocks count once."""
        return len(
            {block.block_id for each in request_ids for _, block in self._newest(each)}
        )

    def needed(self, request_id: str, computed: int, num_tokens: int, step: int) -> int:
        """Return what a request takes more to get to `num_tokens`; negative for less.

        What the windows leave behind on the way comes back, but for superblocks that
        others hold, too.

        Args:
            request_id: the request.
            computed: its tokens computed so far.
            num_tokens: what it gets to.
            step: most tokens that it computes in a step on the way.
        """
        if not self.managers:
            return 0
        sizes = self.sizes
        at_end = sizes.most_blocks(num_tokens, step)
        wanted = min(sizes.held(computed, num_tokens, step), at_end)
        last_step = max(computed, num_tokens - step)
        left = sizes.first_block(last_step, step)
        newest = list(self._newest(request_id))
        staying = sum(index < left and block.ref_cnt > 1 for index, block in newest)
        return wanted + staying - len(newest)


NO_SLIDING = SlidingBlocks(SlidingGroups(0, 0, 0, 1, 1, 0))
