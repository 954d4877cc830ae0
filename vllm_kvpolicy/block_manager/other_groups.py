"""Superblocks of layers with a sliding window or a state, in groups of vLLM's."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from vllm_kvpolicy.sizes import OtherGroups


@dataclass(frozen=True)
class OtherBlocks:
    """What requests hold beside the superblocks of a policy.

    Args:
        managers: of vLLM, one for each group.
        num_processed: returns how many tokens of a request have been computed in steps
            that have ended; what lies behind their window comes back. A state counts
            as a window of two tokens.
    """

    sizes: OtherGroups = OtherGroups(0, 0, 0, 1, 1, 0)  # none
    managers: Sequence[Any] = ()
    num_processed: Callable[[str], int] = lambda request_id: 0

    def _newest(self, request_id: str) -> Iterator[tuple[int, Any]]:
        """Yield a request's superblocks, newest first, and their places in its rows."""
        for manager in self.managers:
            row = manager.req_to_blocks.get(request_id, ())
            # Of states, older ones than these are null.
            gone = getattr(manager, "_num_retired_blocks", {}).get(request_id, 0)
            for index in reversed(range(gone, len(row))):
                if not row[index].is_null:
                    yield index, row[index]
                elif self.sizes.most_each is None:  # so are all older ones
                    break

    def held(self, request_id: str) -> int:
        """Return the superblocks that a request holds."""
        return sum(1 for _ in self._newest(request_id))

    def held_by(self, request_ids: Iterable[str]) -> int:
        """Return what requests, and no others, hold; what they share counts once.

        What others hold, too, stays taken when these requests move on.
        """
        return held_by_no_others(
            block for each in request_ids for _, block in self._newest(each)
        )

    def needed(self, request_id: str, computed: int, num_tokens: int, step: int) -> int:
        """Return what a request takes more to get to `num_tokens`; negative for less.

        What windows leave behind on the way comes back, but for superblocks that others
        hold, too. In the first step that is what lies behind the window of what
        has really been computed: a longer step may still be under way.

        Args:
            step: most tokens that it computes in a step on the way.
        """
        if not self.managers:
            return 0
        if self.sizes.most_each == 1:  # which comes back when the request ends
            return self._taken(request_id, num_tokens)
        newest = list(self._newest(request_id))
        end = min(computed + step, num_tokens)
        left = self.sizes.first_block(self.num_processed(request_id), 0)
        back = sum(index < left and block.ref_cnt <= 1 for index, block in newest)
        first_step = self._taken(request_id, end) - back
        if end == num_tokens:
            return first_step
        wanted = min(
            self.sizes.held(computed, num_tokens, step),
            self.sizes.most_blocks(num_tokens, step),
        )
        left = self.sizes.first_block(max(computed, num_tokens - step), step)
        staying = sum(index < left and block.ref_cnt > 1 for index, block in newest)
        return max(first_step, wanted + staying - len(newest))

    def _taken(self, request_id: str, num_tokens: int) -> int:
        """Return what a request's rows take in a step that gets to `num_tokens`.

        One superblock more of a state, and two where vLLM saves one on the way; those
        that it skips are none.
        """
        taken = 0
        for manager in self.managers:
            row = manager.req_to_blocks.get(request_id, ())
            more = max(-(-num_tokens // manager.block_size) - len(row), 0)
            if self.sizes.most_each is not None:
                more = min(more, 1 + manager.has_prefill_checkpoint_blocks)
            taken += more
        return taken


def held_by_no_others(blocks: Iterable[Any]) -> int:
    """Return how many superblocks only these references hold; each counts once."""
    found = list(blocks)
    num_here = Counter(block.block_id for block in found)
    ref_counts = {block.block_id: block.ref_cnt for block in found}
    return sum(ref_counts[each] <= num_here[each] for each in num_here)


def run_events_first(coordinator: KVCacheCoordinator, own: Any) -> None:
    """Have an event give superblocks back before other groups take theirs.

    vLLM checks that there are enough for all groups together, and then has each take
    its own, in the order of the model's layers. A model may begin with a window.

    Args:
        coordinator: of all groups; changed in place.
    """
    allocate = coordinator.allocate_new_blocks

    def allocate_new_blocks(request_id: str, *args: Any, **options: Any) -> Any:
        own.run_due_event(request_id)
        return allocate(request_id, *args, **options)

    coordinator.allocate_new_blocks = allocate_new_blocks  # type: ignore[method-assign]
