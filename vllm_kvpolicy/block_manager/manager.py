"""The KV cache spec and manager: how a bounded request looks to vLLM's block pool.

The spec states the compressed footprint to vLLM's start-up checks; the manager gives
superblocks back inside vLLM's own `allocate_slots`. Importing this module registers
both. Workers and schedulers of an engine with a policy import it, and so does
unpickling the spec; the entry point never does.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_kvpolicy.block_manager.other_groups import OtherBlocks, held_by_no_others
from vllm_kvpolicy.block_manager.planner import Planner, RequestState
from vllm_kvpolicy.config_values import own_config
from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.protocol import UsedBlocks
from vllm_kvpolicy.sizes import max_blocks_per_request


class Offers:
    """Superblocks of one group that this step has offered to the prefix cache.

    vLLM offers superblocks when it schedules the tokens that fill them. A request that
    priority scheduling preempts in the same step never computes them, and vLLM itself
    would leave them in the cache without content.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # By request, the first entry that this step has offered.
        self._first: dict[str, int] = {}
        # By request with an event, how many entries it had offered before its first.
        self._ended: dict[str, int] = {}

    def offer(
        self,
        request_id: str,
        cache_blocks: Callable[..., None],
        *args: Any,
        **options: Any,
    ) -> None:
        """Call vLLM's `cache_blocks`; note what it has offered."""
        known = self._manager.num_cached_block
        before = known.get(request_id, 0)
        cache_blocks(*args, **options)
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


class OtherOffers(Offers):
    """What a request of a policy offers in a group of windows or of states.

    They follow from hidden states, which behind the first event depend on what layers
    of full attention keep. So nothing is offered from there on, as in the policy's
    group.

    vLLM keeps windows that end where the same prompt, sent again, would go on, and
    offers no others unless users ask for more. A policy lets a request take less, so
    that the window that ends there is kept, too.

    Args:
        manager: vLLM's, of the group; its `cache_blocks` is replaced.
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
        """Offer full superblocks, none past the first event.

        No step goes past an event, so that behind it nothing is left to offer. vLLM
        saves states inside a step, too, whatever `num_tokens` says.
        """
        state = self._planner.states.get(request.request_id)
        if state is not None:
            if num_tokens > state.first_event:
                return
            last = state.usable_hit(request.num_prompt_tokens - 1)
            replay_boundaries = (*replay_boundaries, last)
        given = request, num_tokens, retention_interval
        options = {"replay_boundaries": replay_boundaries}
        self.offer(request.request_id, self._stock, *given, **options)


class Turnover:
    """The superblocks of one event: read by it, written by it, taken and given back.

    Example: a request owns a b c d e, of which a, b and c are cached, and 4 hold its
    survivors afterwards. d and e can be written; two more are taken, and a, b and c go
    back to the prefix cache.

    Args:
        owned: what the event reads, in time order.
        num_dest: how many hold survivors afterwards.
        is_writable: whether the request alone uses a block and it is not cached.
    """

    def __init__(
        self,
        owned: Sequence[KVCacheBlock],
        num_dest: int,
        is_writable: Callable[[KVCacheBlock], bool],
    ) -> None:
        self.owned, self.num_dest = owned, num_dest
        self.writable = [is_writable(block) for block in owned]
        self.num_fresh = max(num_dest - sum(self.writable), 0)

    @property
    def let_go(self) -> list[KVCacheBlock]:
        """What the request lets go without writing to it, in time order."""
        pairs = zip(self.owned, self.writable, strict=True)
        return [block for block, is_writable in pairs if not is_writable]

    @property
    def net_taken(self) -> int:
        """How many free blocks the pool has less afterwards; negative for more."""
        freed = sum(block.ref_cnt == 1 for block in self.let_go)
        return self.num_dest - sum(self.writable) - freed

    def homes(self, fresh: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Return what may be written, at least `num_dest` blocks.

        Blocks stay at their place where they can, so that survivors need not move.

        Args:
            fresh: `num_fresh` blocks that take the places of the first ones that
                cannot be written.
        """
        left, found = list(fresh), []
        for block, is_writable in zip(self.owned, self.writable, strict=True):
            if is_writable:
                found.append(block)
            elif left:
                found.append(left.pop(0))
        return found


@dataclass(frozen=True, kw_only=True)
class KVPolicySpec(FullAttentionSpec):
    """Full attention that tells vLLM the bounded size of a request."""

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes that one request of max_model_len tokens may hold.

        Where vLLM searches for the longest request that fits, it asks with other
        lengths in `vllm_config` than the engine's.
        """
        config = own_config(vllm_config)
        return max_blocks_per_request(vllm_config, config) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class KVPolicyLatentSpec(MLAAttentionSpec):
    """The same of layers whose heads share latent vectors (MLA)."""

    max_memory_usage_bytes = KVPolicySpec.max_memory_usage_bytes


class KVPolicyManager(FullAttentionManager):
    """Keeps vLLM's index-aligned block list, with freed entries null.

    A request's list is indexed by logical position // N. After an event its first
    entries hold what is pinned and the destination blocks; the rest up to the frontier
    is null.

    Query windows are superblocks of the same pool. A request borrows them in the step
    that computes the first query that its next event reads, and the event returns them.
    """

    planner: Planner
    others: OtherBlocks
    blocks_returned: int
    # Drafts behind a step's own tokens that layers of a drafter write, and the most
    # tokens of a request, up to which they do.
    lookahead_tokens: int = 0
    most_tokens: int = 0
    # Superblocks are offered when the token after them is computed: `lookahead_hasher`.
    offers_later: bool = False
    # What the request whose turn it is leaves to a more urgent one that waits.
    claimed: int = 0
    # Of this group and of the others.
    offers: list[Offers]
    # By request, the superblocks of its open query window.
    _windows: dict[str, list[KVCacheBlock]]

    def attach(
        self,
        planner: Planner,
        others: OtherBlocks,
        place: Callable[..., list[KVCacheBlock]] | None = None,
    ) -> None:
        """Connect to the engine's planner; the scheduler does so once.

        Args:
            place: chooses the superblocks of survivors, as `policies.testing.shuffled`
                does; None keeps the oldest ones, so that survivors move towards the
                front.
        """
        self.planner, self.others, self.place = planner, others, place
        self.blocks_returned = 0
        self._windows = {}
        beside = [OtherOffers(each, planner) for each in others.managers]
        self.offers = [Offers(self), *beside]

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """An event puts survivors where other tokens were."""
        return False

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Offer full superblocks to the prefix cache, none past the first event.

        Until there a request's keys and values are those of full attention, whatever
        its policy and budget, so that any other request may use them.
        """
        request_id = request.request_id
        if self.offers_later:
            num_tokens -= 1
        state = self.planner.states.get(request_id)
        if state is not None:
            num_tokens = min(num_tokens, state.first_event)
        num_cached = self.num_cached_block.get(request_id, 0)
        if num_tokens // self.block_size <= num_cached:
            return
        given = request, num_tokens, retention_interval
        options = {"replay_boundaries": replay_boundaries}
        # Not FullAttentionManager's, which offers a superblock that is full in part.
        stock = super(FullAttentionManager, self).cache_blocks
        self.offers[0].offer(request_id, stock, *given, **options)

    def withdraw(self, request_id: str) -> None:
        """Take out of the prefix cache what a request was about to compute."""
        for offers in self.offers:
            offers.withdraw(request_id)

    def new_step_starts(self) -> None:
        """Note that what was scheduled so far will be computed; vLLM calls this."""
        super().new_step_starts()
        for offers in self.offers:
            offers.new_step_starts()

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Carry out the event that the planner has decided for this step; allocate.

        The event travels with this step to the workers and runs before its forward
        pass, after those of all earlier steps. So its superblocks may be given back
        here, although the host has not seen the end of those steps yet.
        """
        self.run_due_event(request_id)
        if self.planner.needs_window(request_id, num_tokens_main_model):
            count = self.planner.states[request_id].footprint.window_blocks
            window = self.block_pool.get_new_blocks(count)
            self._windows[request_id] = window
            self.planner.lend_window(request_id, _ids(window))
        return super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Return what a finished or preempted request held, its query window too."""
        window = self._windows.pop(request_id, [])
        self.offers[0].forget(request_id)
        return super().pop_blocks_for_free(request_id) + window

    def run_due_event(self, request_id: str) -> None:
        """Carry out the event that a request has in this step, if any, once.

        What it owns below its new frontier is replaced by its destinations. Cached and
        shared superblocks are read and let go, never written: what the prefix cache
        holds stays there for others, and for the next turn of the same conversation.
        They are let go before destinations are taken, so that a full pool needs no room
        for both, but for those that other requests hold.
        """
        state = self.planner.due(request_id)
        if state is None:
            return
        turnover = self._turnover(request_id, state)
        blocks, owned = self.req_to_blocks[request_id], turnover.owned
        pinned = state.pinned
        frontier = state.footprint.frontier_blocks(state.computed)
        local = blocks[frontier:]
        self.block_pool.free_blocks(reversed(turnover.let_go))
        self.block_pool.free_blocks(self._windows.pop(request_id, ()))
        fresh = self.block_pool.get_new_blocks(turnover.num_fresh)
        homes = turnover.homes(fresh)
        dest = homes[: turnover.num_dest]
        if self.place is not None:
            seed = event_seed(state.ordinal, state.computed)
            dest = self.place(homes, turnover.num_dest, self._take, seed)
        self._give_back(homes, dest)
        empty = [self._null_block] * (frontier - pinned - len(dest))
        blocks[pinned:frontier] = dest + empty
        if self.enable_caching:
            self.offers[0].end(request_id, frontier)
        self.blocks_returned += len(owned) - len(dest)
        self.planner.record(
            request_id,
            pinned_blocks=_ids(blocks[:pinned]),
            source_blocks=_ids(owned),
            dest_blocks=_ids(dest),
            local_blocks=_ids(local),
        )

    def _turnover(self, request_id: str, state: RequestState) -> Turnover:
        """Return what the event of this step takes from the pool and gives back.

        Asked for when vLLM counts what a step takes, and when the event runs. Nothing
        that it depends on may change between: the count would be another.
        """
        blocks, pinned = self.req_to_blocks[request_id], state.pinned
        frontier = state.footprint.frontier_blocks(state.computed)
        known = max(state.frontier_blocks, pinned)
        owned = blocks[pinned : state.global_blocks] + blocks[known:frontier]
        # After an event that left surplus, fewer may be owned than this one may fill.
        num_dest = min(state.num_dest(state.computed) - pinned, len(owned))
        return Turnover(owned, num_dest, self.block_pool.is_block_writable)

    def give_back_surplus(self, used: UsedBlocks) -> None:
        """Free the destinations that an event turned out not to need.

        Safe while later steps are under way: those read the worker's page lists, in
        which these superblocks do not occur.
        """
        self.planner.note_held(used.request_id, self.num_held(used.request_id))
        surplus = self.planner.surplus(used)
        if surplus is None:
            return
        first, last = surplus
        blocks = self.req_to_blocks[used.request_id]
        self._give_back(blocks[first:last], ())
        self.blocks_returned += last - first
        blocks[first:last] = [self._null_block] * (last - first)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the blocks that the request takes from the pool.

        vLLM admits a request when its whole known length fits. Ours never holds that
        much at once: the cap is the peak of this very request, budget included. In a
        step with an event, what the event gives back counts against what it takes, and
        so does its query window.
        """
        if apply_admission_cap:
            num_shared = sum(block.ref_cnt > 0 for block in new_computed_blocks)
            peak = self.planner.peak_blocks(request_id, num_tokens, num_shared)
            if peak is not None:
                return max(peak - self._num_own(request_id), 0)
        beside = self.claimed + self._taken_beside(request_id, num_tokens_main_model)
        return beside + super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def _taken_beside(self, request_id: str, num_tokens: int) -> int:
        """Return what an event that is due and the next query window take.

        Args:
            num_tokens: what it gets to, no further than the event behind that one.
        """
        state = self.planner.states.get(request_id)
        if state is None:
            return 0
        num_open, taken = len(state.window), 0
        if state.due:
            taken = self._turnover(request_id, state).net_taken - num_open
            num_open = 0
        if not num_open and num_tokens > state.window_start:
            taken += state.footprint.window_blocks
        return taken

    def num_needed(
        self, request_id: str, num_tokens: int, step: int | None = None
    ) -> int:
        """Return the superblocks that a running request takes to get to `num_tokens`.

        No event may lie between; one that is due in this step is counted, and so is the
        query window of the next.

        Args:
            step: most tokens that it computes in a step; None if this step suffices.
        """
        num_entries = len(self.req_to_blocks.get(request_id, ()))
        ahead = min(self.lookahead_tokens, max(self.most_tokens - num_tokens, 0))
        more = max(cdiv(num_tokens + ahead, self.block_size) - num_entries, 0)
        more += self._taken_beside(request_id, num_tokens)
        state = self.planner.states.get(request_id)
        if state is None:
            return more
        step = max(num_tokens - state.computed, 1) if step is None else step
        return more + self.others.needed(request_id, state.computed, num_tokens, step)

    def hashes(self, request: Request) -> Sequence[Any]:
        """Return the hashes of a request's superblocks in this manager's group.

        A request has one for as many tokens as the smallest superblocks of all groups
        have; it is of these and of all tokens before.
        """
        each = self.block_size // self.block_pool.hash_block_size
        return request.block_hashes[each - 1 :: each]

    def num_shared(self, request_id: str) -> int:
        """Return how many of a request's first superblocks others hold, too."""
        row = self.req_to_blocks.get(request_id, ())
        return sum(1 for _ in takewhile(lambda block: block.ref_cnt > 1, row))

    @property
    def num_usable(self) -> int:
        """Superblocks of the pool; one more is vLLM's null block."""
        return self.block_pool.num_gpu_blocks - 1

    @property
    def num_free(self) -> int:
        """Superblocks that nobody holds; some of them may be cached."""
        return self.block_pool.get_num_free_blocks()

    @property
    def num_taken(self) -> int:
        """Superblocks that requests hold."""
        return self.num_usable - self.num_free

    def pool_counts(self) -> tuple[int, int]:
        """Return (local, global) superblocks of requests; windows count as local.

        So do those of other layers than full attention.
        """
        num_global = self.planner.num_global_blocks
        return self.num_taken - num_global, num_global

    def num_held(self, request_id: str) -> int:
        """Return the superblocks that a request holds, its query window included.

        And those of other layers than full attention.
        """
        return self._num_own(request_id) + self.others.held(request_id)

    def num_held_by(self, request_ids: Sequence[str]) -> int:
        """Return what requests hold; of windows what nobody else holds, once."""
        own = sum(map(self._num_own, request_ids))
        return own + self.others.held_by(request_ids)

    def num_staying(self, leaving: Collection[str]) -> int:
        """Return the superblocks that are still taken when these requests have left."""
        own = chain.from_iterable(map(self._own, leaving))
        return self.num_taken - held_by_no_others(own) - self.others.held_by(leaving)

    def _own(self, request_id: str) -> list[KVCacheBlock]:
        """Return what a request holds in this manager's group."""
        row = self.req_to_blocks.get(request_id, [])
        state = self.planner.states.get(request_id)
        if state is not None:
            row = row[: state.global_blocks] + row[state.frontier_blocks :]
        return row + self._windows.get(request_id, [])

    def _num_own(self, request_id: str) -> int:
        """Return how many `_own` returns, without a list of them."""
        count = len(self.req_to_blocks.get(request_id, ()))
        state = self.planner.states.get(request_id)
        if state is not None:
            count -= max(min(state.frontier_blocks, count) - state.global_blocks, 0)
        return count + len(self._windows.get(request_id, ()))

    def _take(self, count: int) -> list[KVCacheBlock]:
        num_free = self.block_pool.get_num_free_blocks()
        return self.block_pool.get_new_blocks(min(count, num_free))

    def _give_back(
        self, owned: Sequence[KVCacheBlock], dest: Sequence[KVCacheBlock]
    ) -> None:
        kept = {block.block_id for block in dest}
        freed = [block for block in reversed(owned) if block.block_id not in kept]
        self.block_pool.free_blocks(freed)


def own_manager(managers: Sequence[Any]) -> tuple[KVPolicyManager, list[Any]]:
    """Return the manager of a policy's group, and those of the other groups.

    Raises:
        TypeError: there is none, or more than one.
    """
    own = [each for each in managers if isinstance(each, KVPolicyManager)]
    if len(own) != 1:
        raise TypeError(
            f"expected one KV cache group with a KVPolicyManager, got {managers}"
        )
    return own[0], [each for each in managers if each is not own[0]]


def _ids(blocks: Sequence[KVCacheBlock]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)


KVCacheSpecRegistry._ensure_registered()
for _spec in (KVPolicySpec, KVPolicyLatentSpec):
    KVCacheSpecRegistry.register(_spec, KVPolicyManager, _spec)
