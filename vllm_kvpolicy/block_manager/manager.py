"""The KV cache spec and manager: how a bounded request looks to vLLM's block pool.

The spec states the compressed footprint to vLLM's start-up checks; the manager gives
superblocks back inside vLLM's own `allocate_slots`. Importing this module registers
both. Workers and schedulers of an engine with a policy import it, and so does
unpickling the spec; the entry point never does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvpolicy.block_manager.placement import PLACEMENTS
from vllm_kvpolicy.block_manager.planner import Planner
from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.protocol import UsedBlocks


@dataclass(frozen=True, kw_only=True)
class KVPolicySpec(FullAttentionSpec):
    """Full attention whose requests hold at most `max_blocks_per_request` superblocks.

    Args:
        max_blocks_per_request: worst case over all prompt lengths up to max_model_len.
    """

    max_blocks_per_request: int

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes that one request of max_model_len tokens may hold."""
        return self.max_blocks_per_request * self.page_size_bytes

    @property
    def prefix_cacheable(self) -> bool:
        """Survivors are not a prefix, so nothing here may enter the prefix cache."""
        return False

    @classmethod
    def merge(cls, specs: list["KVPolicySpec"]) -> "KVPolicySpec":
        """Return the one spec of a group; all layers must agree in every field."""
        if any(spec != specs[0] for spec in specs[1:]):
            raise ValueError(
                "a KV policy needs one attention geometry in all layers, got "
                f"{sorted({repr(spec) for spec in specs})}"
            )
        return specs[0]


def is_private(block: KVCacheBlock) -> bool:
    """Return whether this request alone holds a superblock, uncached."""
    return block.ref_cnt == 1 and block.block_hash is None and not block.is_null


class KVPolicyManager(FullAttentionManager):
    """Keeps vLLM's index-aligned block list, with freed entries null.

    A request's list is indexed by logical position // N. After an event its lowest
    entries hold the destination blocks and the rest up to the frontier is null.
    """

    planner: Planner
    placement_name: str
    blocks_returned: int

    def attach(self, planner: Planner, placement_name: str) -> None:
        """Connect to the engine's planner; the scheduler does so once."""
        self.planner = planner
        self.placement_name = placement_name
        self.blocks_returned = 0

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Carry out the event that the planner has decided for this step, if any.

        `processed_computed_tokens` is ignored: it counts only tokens of steps that have
        ended, and with asynchronous scheduling that lags behind the position at which
        the planner has scheduled the event. Freeing at that position is safe: the event
        travels with this step and runs before its forward pass, after those of all
        earlier steps. vLLM calls this before it allocates for the request.
        """
        state = self.planner.take_due(request_id)
        if state is None:
            return
        blocks = self.req_to_blocks[request_id]
        frontier = state.footprint.frontier_blocks(state.computed)
        owned = blocks[: state.global_blocks] + blocks[state.frontier_blocks : frontier]
        shared = [block.block_id for block in owned if not is_private(block)]
        if shared:
            raise RuntimeError(
                f"request {request_id}: superblocks {shared} are shared or cached and "
                "cannot be compacted; prefix caching must be off"
            )
        # After an event that left surplus, fewer may be owned than this one may fill.
        count = min(state.footprint.global_blocks(state.computed), len(owned))
        seed = event_seed(state.ordinal, state.computed)
        dest = PLACEMENTS[self.placement_name](owned, count, self._take, seed)
        self._give_back(owned, dest)
        blocks[:frontier] = dest + [self._null_block] * (frontier - len(dest))
        self.planner.record(
            request_id,
            source_blocks=tuple(block.block_id for block in owned),
            dest_blocks=tuple(block.block_id for block in dest),
            local_blocks=tuple(block.block_id for block in blocks[frontier:]),
        )

    def give_back_surplus(self, used: UsedBlocks) -> None:
        """Free the destinations that an event turned out not to need.

        Safe while later steps are under way: those read the worker's page lists, in
        which these superblocks do not occur.
        """
        self.planner.note_held(used.request_id, self._num_held(used.request_id))
        surplus = self.planner.surplus(used)
        if surplus is None:
            return
        first, last = surplus
        blocks = self.req_to_blocks[used.request_id]
        self._give_back(blocks[first:last], ())
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
        """Return the blocks to allocate; admission asks for the compressed footprint.

        vLLM admits a request when its whole known length fits. Ours never holds that
        much at once: the cap is the peak of this very request, budget included.
        """
        if apply_admission_cap:
            peak = self.planner.peak_blocks(request_id, num_tokens)
            if peak is not None:
                num_held = self._num_held(request_id)
                return max(min(peak, cdiv(num_tokens, self.block_size)) - num_held, 0)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def pool_counts(self) -> tuple[int, int]:
        """Return (local, global) superblocks held by all requests."""
        num_global = self.planner.num_global_blocks
        num_used = self.block_pool.num_gpu_blocks - 1  # one is vLLM's null block
        num_used -= self.block_pool.get_num_free_blocks()
        return num_used - num_global, num_global

    def _num_held(self, request_id: str) -> int:
        state = self.planner.states.get(request_id)
        num_entries = len(self.req_to_blocks.get(request_id, ()))
        if state is None or not num_entries:
            return num_entries
        return num_entries - state.frontier_blocks + state.global_blocks

    def _take(self, count: int) -> list[KVCacheBlock]:
        num_free = self.block_pool.get_num_free_blocks()
        return self.block_pool.get_new_blocks(min(count, num_free))

    def _give_back(
        self, owned: Sequence[KVCacheBlock], dest: Sequence[KVCacheBlock]
    ) -> None:
        kept = {block.block_id for block in dest}
        freed = [block for block in reversed(owned) if block.block_id not in kept]
        self.block_pool.free_blocks(freed)
        self.blocks_returned += len(freed)


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(KVPolicySpec, KVPolicyManager, KVPolicySpec)
