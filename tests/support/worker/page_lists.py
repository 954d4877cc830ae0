"""Requests whose heads hold random pages, their tables, and steps of theirs."""

from random import Random
from types import SimpleNamespace

import numpy as np
import torch

from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables

SIZE, SLOTS, MOST, ROW, CPU = 4, 6, 6, 60, torch.device("cpu")


class Lists:
    """Page lists of requests by name; "n" has had no event.

    Args:
        own: [L, H] id of each head's page of superblock 0.
        blocks: superblocks of the pool, all layers of which are one allocation.
        room: rows and columns of a step's tables that are there from the start.

    Attributes:
        names: requests of a batch in row order; "n" alone at first.
        rows: superblocks of each by logical position.
        ends: tokens of each that are computed after the step.
    """

    def __init__(
        self, seed: int, own: torch.Tensor, blocks: int, room: tuple[int, int] = (0, 0)
    ) -> None:
        self.rng, self.blocks, self.own = Random(seed), blocks, own.flatten()
        self.layers, self.heads = own.shape
        self.requests = RequestTable(SLOTS, MOST, SIZE, CPU)
        # Each request has superblocks of its own, and random pages of any others.
        own_blocks = torch.arange((SLOTS + 1) * MOST, dtype=torch.int32).flip(0)
        self.requests.global_blocks[:] = own_blocks.view(-1, MOST)
        sizes = len(own_blocks), self.own, self.heads
        self.tables = HeadTables(self.requests, *sizes)
        self.folded = FoldedTables(*own.shape, *room, CPU)
        self.lists: dict[str, list[list[int]]] = {"n": [[]] * len(self.own)}
        self.frontier, self.names = {"n": 0}, ["n"]
        self.rows: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}

    def event(self, name: str, frontier: int) -> tuple[int, torch.Tensor]:
        """Give a request new lists and a new frontier; return its row and [1, C]."""
        sizes = [self.rng.randint(0, MOST) for _ in self.own]
        highest = self.blocks * len(self.own)
        lists = [[self.rng.randrange(1, highest) for _ in range(n)] for n in sizes]
        flat = torch.zeros(1, MOST * len(self.own), dtype=torch.int64)
        flat[0, : sum(sizes)] = torch.tensor([page for each in lists for page in each])
        row = self.requests.take(name)
        first = torch.tensor([[0, *sizes]]).cumsum(-1)
        dest = self.requests.global_blocks[row : row + 1].long()
        self.tables.update([row], torch.tensor([row]), dest, first, flat)
        self.requests.skip[row] = self.requests.skip_cpu[row] = frontier
        self.requests.frontier_blocks_cpu[row] = frontier
        self.lists[name], self.frontier[name] = lists, frontier
        self.folded.forget([name, "not in the batch"])
        return row, flat

    def choose(self, count: int) -> None:
        """Put that many of the requests into the batch, with superblocks of theirs."""
        self.names = self.rng.sample(sorted(self.lists), count)
        self.rows = {
            name: [self.rng.randrange(1, self.blocks) for _ in range(ROW)]
            for name in self.names
        }

    def metadata(
        self, counts: list[int], padding: int = 0, max_seq_len: int = 0
    ) -> SimpleNamespace:
        """Return what vLLM tells of a step that computes `counts` tokens of each."""
        ends = [self.ends[name] for name in self.names] + [0] * padding
        rows = [self._table_row(name) for name in self.names] + [[0] * ROW] * padding
        starts = torch.from_numpy(np.cumsum([0, *counts, *[0] * padding])).int()
        held = torch.tensor(ends, dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=len(ends),
            max_query_len=max(counts, default=1),
            max_seq_len=max_seq_len,
            seq_lens=held,
            seq_lens_cpu_upper_bound=held,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            block_table_tensor=torch.tensor(rows, dtype=torch.int32),
        )

    def _table_row(self, name: str) -> list[int]:
        """Return a row of vLLM's block table: stale ids behind the last block."""
        count = -(-self.ends[name] // SIZE)
        stale = [self.rng.randrange(self.blocks) for _ in range(ROW - count)]
        return self.rows[name][:count] + stale

    def held(self, name: str, head: int, end: int) -> tuple[list[int], list[int]]:
        """Return the global and the local pages of head l * H + h up to `end`."""
        blocks = self.rows[name][self.frontier[name] : -(-end // SIZE)]
        own = [int(self.own[head]) + self.heads * block for block in blocks]
        return self.lists[name][head], own
