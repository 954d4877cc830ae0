"""What a request offers to the prefix cache, and takes back where nothing fills it."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.planner import Planner


class Offers:
    """Superblocks of one group that this step has offered to the prefix cache.

    vLLM offers superblocks when it schedules the tokens that fill them. A request that
    priority scheduling preempts in the same step never computes them, and vLLM itself
    would leave them in the cache without content.

    Args:
        manager: vLLM's, of the group.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # By request, the first entry that this step has offered.
        self._first: dict[str, int] = {}
        # By request with an event, how many entries it had offered before its first.
        self._ended: dict[str, int] = {}

    def offer(self, request_id: str, cache_blocks: Callable[[], None]) -> None:
        """Call vLLM's `cache_blocks`; note what it has offered."""
        known = self._manager.num_cached_block
        before = known.get(request_id, 0)
        cache_blocks()
        if known.get(request_id, 0) > before:
            self._first.setdefault(request_id, before)

    def withdraw(self, request_id: str) -> None:
        """Take out of the prefix cache what a request was about to compute."""
        first = self._first.pop(request_id, None)
        if first is not None:
            blocks = self._manager.req_to_blocks[request_id][first:]
            self._manager.block_pool.evict_blocks({block.block_id for block in blocks})

    def new_step_starts(self) -> None:
        """Note that what was scheduled so far will be computed."""
        self._first.clear()

    def end(self, request_id: str, frontier: int) -> None:
        """Note that below a frontier, in superblocks, nothing is left to offer."""
        known = self._manager.num_cached_block
        self._ended.setdefault(request_id, known.get(request_id, 0))
        known[request_id] = max(known.get(request_id, 0), frontier)

    def forget(self, request_id: str) -> None:
        """Forget what a finished or preempted request had offered."""
        self._ended.pop(request_id, None)

    def count_past_events(self, cache: Any) -> None:
        """Have vLLM tell users what a prompt put into the prefix cache, whole.

        It looks for cached superblocks in the request's list when the prompt has been
        computed. By then, events may have replaced them.

        Args:
            cache: vLLM's KVCacheManager; changed in place.
        """
        estimate = cache.estimate_cached_tokens

        def estimate_cached_tokens(request: Request) -> int:
            ended = self._ended.get(request.request_id, 0)
            return max(estimate(request), ended * self._manager.block_size)

        cache.estimate_cached_tokens = estimate_cached_tokens


class WindowOffers(Offers):
    """What a request of a policy offers in a group of layers with a sliding window.

    Keys and values of these layers follow from hidden states, which behind the first
    event depend on what layers of full attention keep. So nothing is offered from there
    on, as in the policy's group.

    vLLM keeps windows that end where the same prompt, sent again, would go on, and
    offers no others unless users ask for more. A policy lets a request take less, so
    that the window that ends there is kept, too.

    Args:
        manager: vLLM's, of the group; its `cache_blocks` is replaced.
        planner: knows where requests have their first events.
    """

    def __init__(self, manager: Any, planner: Planner) -> None:
        super().__init__(manager)
        self._planner, self._stock = planner, manager.cache_blocks
        manager.cache_blocks = self.cache_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Offer full superblocks, none past the first event."""
        state = self._planner.states.get(request.request_id)
        if state is not None:
            plan = state.plan
            num_tokens = min(num_tokens, plan.first_event)
            last = plan.usable_hit(request.num_prompt_tokens - 1)
            replay_boundaries = (*replay_boundaries, last)

        def cache_blocks() -> None:
            self._stock(
                request,
                num_tokens,
                retention_interval,
                replay_boundaries=replay_boundaries,
            )

        self.offer(request.request_id, cache_blocks)
