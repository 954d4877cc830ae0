"""The slot table: which superblocks hold each request's survivors, and its frontier."""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.request_slots import Slots
from vllm_kvpolicy.worker.transfer import to_device


class SlotTable(Slots):
    """Superblocks of survivors and frontier of each request, on the device.

    A request has a slot from its first event on. The last slot belongs to no request
    and says "no event yet", so that requests without an event, padding and batches of
    graph capture need no branch.

    Args:
        num_slots: requests that may be live at once.
        max_global_blocks: most superblocks of survivors of one request.
        block_size: N, tokens per superblock.
        device: where the tables live.
    """

    def __init__(
        self,
        num_slots: int,
        max_global_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(num_slots)
        self.block_size = block_size
        self.device = device
        size = num_slots + 1
        self.global_blocks = torch.zeros(
            (size, max_global_blocks), dtype=torch.int32, device=device
        )
        self.num_global = torch.zeros(size, dtype=torch.int32, device=device)
        self.frontier_blocks = torch.zeros(size, dtype=torch.int32, device=device)
        self.dropped_tokens_cpu = np.zeros(size, dtype=np.int32)
        self.frontier_blocks_cpu = np.zeros(size, dtype=np.int32)
        self.positions_cpu = np.zeros(size, dtype=np.int64)  # of the last events

    def take(self, request_id: str) -> int:
        """Return the request's slot; its first event gets a fresh one."""
        return self.take_one(request_id)

    def update(self, slots: Sequence[int], events: Sequence[CompactEvent]) -> None:
        """Enter the destinations and frontiers of these events."""
        width = max(len(event.dest_blocks) for event in events)
        blocks = [
            event.dest_blocks + (0,) * (width - len(event.dest_blocks))
            for event in events
        ]
        index = self.to_device(slots)
        self.global_blocks[index, :width] = self.to_device(blocks).int()
        self.num_global[index] = self.to_device(
            [len(e.dest_blocks) for e in events]
        ).int()
        self.frontier_blocks[index] = self.to_device(
            [event.frontier_blocks for event in events]
        ).int()
        for slot, event in zip(slots, events, strict=True):
            dropped_blocks = event.frontier_blocks - len(event.dest_blocks)
            self.dropped_tokens_cpu[slot] = dropped_blocks * self.block_size
            self.frontier_blocks_cpu[slot] = event.frontier_blocks
            self.positions_cpu[slot] = event.position

    def fresh_tokens(self, slots: Sequence[int], events: Sequence[CompactEvent]) -> int:
        """Return the most tokens that a request computed since its last event."""
        return max(
            event.position - int(self.positions_cpu[slot] if event.ordinal else 0)
            for slot, event in zip(slots, events, strict=True)
        )

    def to_device(
        self, values: Sequence[int] | Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Copy host integers to the device of the table as int64, without waiting."""
        return to_device(values, self.device)
