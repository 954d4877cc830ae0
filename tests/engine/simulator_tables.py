"""Checks the worker's real SlotTable against the simulation's own rows.

Owns one SlotTable on the CPU that lives through the same events, drops and reuse as a
worker's would, with exactly as many slots as the engine may run requests.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from simulator_worker import Incarnation, check

from vllm_kvpolicy.attention.slots import SlotTable
from vllm_kvpolicy.protocol import CompactEvent


class TableCheck:
    """A SlotTable and what its answers should be.

    Args:
        num_slots, max_global_blocks, block_size: see SlotTable.
    """

    def __init__(self, num_slots: int, max_global_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        device = torch.device("cpu")
        self.slots = SlotTable(num_slots, max_global_blocks, block_size, device)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests, as KVPolicyRuntime.begin_step does."""
        self.slots.drop(request_ids)

    def update(self, events: Sequence[CompactEvent]) -> None:
        """Enter a step's events."""
        if events:
            slots = [self.slots.take(event.request_id) for event in events]
            self.slots.update(slots, events)

    def compare(self, scheduled: Mapping[str, int], live: Mapping[str, Incarnation]):
        """Compare tables and lengths of a batch with the worker's own rows.

        Args:
            scheduled: tokens by request, already computed.
            live: the requests' true state.
        """
        if not scheduled:
            return
        size, names = self.block_size, list(scheduled)
        states = [live[name] for name in names]
        rows = torch.from_numpy(self.slots.rows(names, len(names)))
        expected = [
            [
                *(state.global_slots[::size] // size).tolist(),
                *state.row[state.frontier_blocks : -(-state.computed // size)].tolist(),
            ]
            for state in states
        ]
        table = torch.tensor([state.row.tolist() for state in states]).int()
        width = max(map(len, expected))
        found = self.slots.physical_tables(rows, table, width).tolist()
        dropped = self.slots.dropped_tokens(rows).tolist()
        on_host = self.slots.dropped_tokens_cpu[rows.numpy()].tolist()
        check(dropped == on_host, "lengths on host and device", names)
        for name, state, want, have, gone in zip(
            names, states, expected, found, dropped, strict=True
        ):
            check(have[: len(want)] == want, name, "table", have, "expected", want)
            held = state.survivors.shape[1] + state.computed
            held -= state.frontier_blocks * size
            check(state.computed - gone == held, name, "length", state.computed, gone)
