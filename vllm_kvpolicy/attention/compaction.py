"""Runs the events of a step: read, decide, fill up pages, move, remember.

Called by attention.runtime before the step's forward pass, on the same stream.
Process: worker
"""

from collections.abc import Sequence

import torch

from vllm_kvpolicy.attention.pages import HeadPages
from vllm_kvpolicy.attention.slots import SlotTable
from vllm_kvpolicy.attention.survivors import SurvivorMemory
from vllm_kvpolicy.attention.trace import Tracer
from vllm_kvpolicy.attention.windows import QueryWindows
from vllm_kvpolicy.block_manager.placement import event_seed
from vllm_kvpolicy.kernels.compact_pages import compact_pages_ref
from vllm_kvpolicy.kernels.ranking import ascending_indices, fill_next_best
from vllm_kvpolicy.policies.base import Decision, EventInputs, Policy
from vllm_kvpolicy.protocol import CompactEvent


class Compactor:
    """Carries out events on the pages of one KV cache group.

    Args:
        policy: decides which tokens survive.
        pages: the group's keys and values.
        slots: updated after each event.
        windows: queries that the policy asked for.
        credit: memory of the policy's credit, None if it keeps none.
        tracer: records survivors with true positions, None unless asked for.
        scale: softmax scale of the model's attention.
    """

    def __init__(
        self,
        policy: Policy,
        pages: HeadPages,
        slots: SlotTable,
        windows: QueryWindows,
        credit: SurvivorMemory | None,
        tracer: Tracer | None,
        scale: float,
    ) -> None:
        self.policy = policy
        self.pages = pages
        self.slots = slots
        self.windows = windows
        self.credit = credit
        self.tracer = tracer
        self.scale = scale

    def run(self, events: Sequence[CompactEvent]) -> None:
        """Carry out a step's events.

        Events are batched where budget and number of destination blocks agree. All
        decisions and sources of a batch are read before its first write. Batches keep
        the order of the message, in which a block is freed before it is taken.
        """
        batches: list[list[CompactEvent]] = []
        for event in events:
            shape = (event.budget, len(event.dest_blocks))
            last = batches[-1][0] if batches else None
            if last and (last.budget, len(last.dest_blocks)) == shape:
                batches[-1].append(event)
            else:
                batches.append([event])
        for batch in batches:
            self._run_batch(batch)

    def _run_batch(self, events: Sequence[CompactEvent]) -> None:
        slots = [self.slots.take(event.request_id) for event in events]
        index = self.slots.to_device(slots)
        if self.credit is not None:
            pairs = zip(slots, events, strict=True)
            fresh = [slot for slot, event in pairs if not event.ordinal]
            self.credit.clear(self.slots.to_device(fresh))
        inputs, blocks = self._inputs(events, index)
        decision = self.policy.decide(inputs, events[0].budget)
        sources, is_survivor = self._survivors(events, inputs, decision)
        placed = self.policy.arrange(
            sources,
            self.slots.to_device([event_seed(e.ordinal, e.position) for e in events]),
        )
        self._move(events, blocks, placed)
        if self.credit is not None:
            assert decision.credit is not None, "a policy with credit returned none"
            num_tokens = sources.shape[-1] + max(map(self._local_tokens, events))
            survivors = ascending_indices(is_survivor.flatten(0, 2), num_tokens)
            survivors = survivors.view(*sources.shape[:3], num_tokens)
            kept = decision.credit.gather(-1, survivors.clamp_min(0))
            self.credit.write(index, torch.where(survivors < 0, 0.0, kept))
        if self.tracer is not None:
            self.tracer.record(events, slots, decision.keep, placed, inputs.lengths)
        self.slots.update(slots, events)

    def _local_tokens(self, event: CompactEvent) -> int:
        return event.position - event.frontier_blocks * self.pages.block_size

    def _inputs(
        self, events: Sequence[CompactEvent], slots: torch.Tensor
    ) -> tuple[EventInputs, torch.Tensor]:
        """Return what the policy sees and the superblocks [E, P] of all held tokens."""
        block_size, to_device = self.pages.block_size, self.slots.to_device
        rows = [event.source_blocks + event.local_blocks for event in events]
        width = max(map(len, rows))
        blocks = to_device([row + (0,) * (width - len(row)) for row in rows])
        num_global = to_device([len(e.source_blocks) * block_size for e in events])
        lengths_host = [
            len(event.source_blocks) * block_size + self._local_tokens(event)
            for event in events
        ]
        num_tokens, lengths = max(lengths_host), to_device(lengths_host)
        sinks = to_device([event.sinks for event in events])
        token = torch.arange(num_tokens, device=blocks.device)
        is_local = (token >= num_global[:, None]) & (token < lengths[:, None])
        windows = None
        if self.policy.window_tokens:
            windows = self.windows.read(to_device([e.window_slot for e in events]))
        inputs = EventInputs(
            lengths=lengths,
            must_keep=(token < sinks[:, None]) | is_local,
            keys=self._keys(blocks, num_tokens),
            queries=windows,
            credit=self.credit.read(slots, num_tokens) if self.credit else None,
            scale=self.scale,
            num_layers=len(self.pages.keys),
            num_kv_heads=self.pages.num_heads,
        )
        return inputs, blocks

    def _keys(self, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        if not self.policy.needs_keys:
            return None
        return self.pages.gather_keys(blocks, num_tokens)

    def _survivors(
        self,
        events: Sequence[CompactEvent],
        inputs: EventInputs,
        decision: Decision,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the survivors up to whole pages with the next-best tokens.

        Returns:
            sources: [E, L, H, C] int64 token indices for the global pool, ascending,
            and a mask [E, L, H, T] of all survivors, local tokens included.
        """
        block_size, shape = self.pages.block_size, decision.keep.shape
        num_global = len(events[0].dest_blocks) * block_size
        token = torch.arange(shape[-1], device=decision.keep.device)
        valid = (token < inputs.lengths[:, None])[:, None, None].expand(shape)
        target = self.slots.to_device(
            [num_global + self._local_tokens(event) for event in events]
        )
        is_survivor = fill_next_best(
            decision.keep.reshape(-1, shape[-1]),
            decision.score.reshape(-1, shape[-1]),
            valid.reshape(-1, shape[-1]),
            target[:, None].expand(-1, shape[1] * shape[2]).flatten(),
        )
        # Local tokens are the newest and all survive: the first C are global.
        sources = ascending_indices(is_survivor, num_global)
        return sources.view(*shape[:3], num_global), is_survivor.view(shape)

    def _move(
        self,
        events: Sequence[CompactEvent],
        blocks: torch.Tensor,
        placed: torch.Tensor,
    ) -> None:
        """Copy survivors [E, L, H, C] to their destinations, layer by layer."""
        block_size = self.pages.block_size
        offset = torch.arange(block_size, device=blocks.device)
        dest = self.slots.to_device([event.dest_blocks for event in events])
        dest_slots = (dest[:, :, None] * block_size + offset).flatten(1)
        block_of = blocks[:, None, None].expand(*placed.shape[:3], -1)
        source_slots = block_of.gather(-1, placed // block_size) * block_size
        source_slots += placed % block_size
        for layer in range(placed.shape[1]):
            for pages in (self.pages.keys[layer], self.pages.values[layer]):
                compact_pages_ref(pages, source_slots[:, layer], dest_slots)
