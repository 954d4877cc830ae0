"""Checks the worker's real tables against the simulation's own page lists.

Owns a RequestTable, and for heads of their own lengths HeadTables and a Folder; they
live through the same events, drops and reuse as a worker's would, with exactly as many
rows as the engine may run requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from support.engine.simulator_pages import NUM_HEADS, Incarnation, check, own_pages
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.equal import PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, Folder, HeadTables
from vllm_kvpolicy.worker.transfer import to_device_together

CPU = torch.device("cpu")
LAYERS, HEADS = 2, NUM_HEADS // 2
Live = Mapping[str, Incarnation]


class TableCheck:
    """Tables of all heads alike, and what their answers should be."""

    def __init__(
        self, num_requests: int, max_global_blocks: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self.requests = RequestTable(num_requests, max_global_blocks, block_size, CPU)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests, as KVPolicyRuntime.begin does."""
        self.requests.drop(request_ids)

    def update(self, events: Sequence[CompactEvent], live: Live) -> None:
        for event in events:
            rows = [self.requests.take(event.request_id)]
            numbers = self.requests.numbers(rows, [event])
            self.requests.update(rows, [event], to_device_together(numbers, CPU))

    def compare(self, scheduled: Mapping[str, int], live: Live) -> None:
        """Compare tables and lengths of a batch with the worker's own.

        Args:
            scheduled: tokens by request, already computed.
            live: the requests' true state.
        """
        if not scheduled:
            return
        size, names = self.block_size, list(scheduled)
        states = [live[name] for name in names]
        rows = torch.from_numpy(self.requests.rows(names, len(names)))
        expected = [
            [*state.pins.tolist(), *state.dest_blocks, *self._local(state)]
            for state in states
        ]
        table = torch.tensor(np.stack([state.row for state in states])).int()
        width = max(map(len, expected))
        computed = torch.tensor([state.computed for state in states]).int()
        physical = PhysicalTables(self.requests, len(names), width)
        tables, lengths = physical.fill(rows, table, computed, width)
        found, dropped = tables.tolist(), (computed - lengths).tolist()
        on_host = self.requests.dropped_tokens_cpu[rows.numpy()].tolist()
        check(dropped == on_host, "lengths on host and device", names)
        for name, state, want, have, gone in zip(
            names, states, expected, found, dropped, strict=True
        ):
            check(have[: len(want)] == want, name, "table", have, "expected", want)
            held = len(state.survivors[0]) + state.computed
            held -= (state.frontier_blocks - len(state.pins)) * size
            check(state.computed - gone == held, name, "length", state.computed, gone)

    def _local(self, state: Incarnation) -> list[int]:
        end = -(-state.computed // self.block_size)
        return state.row[state.frontier_blocks : end].tolist()


class RaggedCheck(TableCheck):
    """Tables of every head, through the folded batch of each step."""

    def __init__(
        self,
        num_requests: int,
        max_global_blocks: int,
        block_size: int,
        num_blocks: int,
    ) -> None:
        super().__init__(num_requests, max_global_blocks, block_size)
        # The simulation numbers pages superblock by superblock.
        own = torch.arange(NUM_HEADS)
        self.tables = HeadTables(self.requests, num_blocks, own, NUM_HEADS)
        room = FoldedTables(LAYERS, HEADS, 0, 0, CPU)
        self.folder = Folder(self.requests, self.tables, room)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests, as KVPolicyRuntime.begin does."""
        gone = list(request_ids)
        super().drop(gone)
        self.folder.forget(gone)

    def update(self, events: Sequence[CompactEvent], live: Live) -> None:
        """Enter a step's events and the lists that the worker has drawn."""
        super().update(events, live)
        for event in events:
            pages = live[event.request_id].pages
            slot = self.requests.row_of[event.request_id]
            index = torch.tensor([slot])
            if not event.ordinal:
                self.tables.clear([slot], index)
            first = torch.tensor([[0, *map(len, pages)]]).cumsum(-1)
            dest = torch.tensor([event.dest_blocks])
            flat = first.new_zeros(1, dest.numel() * NUM_HEADS)
            flat[0, : int(first[0, -1])] = torch.from_numpy(np.concatenate(pages))
            self.tables.update([slot], index, dest, first, flat)
            self.folder.forget([event.request_id])

    def compare(self, scheduled: Mapping[str, int], live: Live) -> None:
        """Compare the folded batch of a step with the worker's own lists."""
        if not scheduled or not len(self.requests):
            return
        names = list(scheduled)
        states = [live[name] for name in names]
        ends = torch.tensor([state.computed for state in states], dtype=torch.int32)
        counts = np.array(list(scheduled.values()))
        starts = np.concatenate([[0], np.cumsum(counts)])
        common = SimpleNamespace(
            num_reqs=len(names),
            max_query_len=int(counts.max()),
            seq_lens=ends,
            seq_lens_cpu_upper_bound=ends,
            query_start_loc=torch.from_numpy(starts).int(),
            query_start_loc_cpu=torch.from_numpy(starts).int(),
            block_table_tensor=torch.tensor(
                np.stack([state.row for state in states])
            ).int(),
        )
        folded = self.folder.fold(common, names)
        tables = folded.tables.unflatten(1, (-1, HEADS)).numpy()
        lengths = folded.lengths.unflatten(1, (-1, HEADS)).numpy()
        for request, (name, state) in enumerate(zip(names, states, strict=True)):
            stock, pins = own_pages(self._local(state)), own_pages(state.pins)
            for number, own in enumerate(state.pages):
                layer, head = divmod(number, HEADS)
                want = np.concatenate([pins[number], own, stock[number]])
                have = tables[layer, request, head][: len(want)]
                check(np.array_equal(have, want), name, "pages", have, want)
                held = len(state.survivors[number]) + state.computed
                held -= (state.frontier_blocks - len(state.pins)) * self.block_size
                found = int(lengths[layer, request, head])
                check(found == held, name, "length", found, held)
