"""The tier of heads of equal lengths: stock kernels read a shorter block table.

The tensors stay where they are, so that a captured graph reads what the step of its
replay has put there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.kernels.page_tables import page_tables
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.tier import StepMetadata, Tier, padded
from vllm_kvpolicy.worker.transfer import Integers, to_device


class PhysicalTables:
    """Block tables and lengths of a batch by what its rows hold, not by position.

    Args:
        num_rows: most rows of a batch, padding included.
    """

    def __init__(self, requests: RequestTable, num_rows: int, num_columns: int) -> None:
        self.requests = requests
        shape = num_rows, num_columns
        self.tables = torch.zeros(shape, dtype=torch.int32, device=requests.device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=requests.device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.tables.nbytes + self.lengths.nbytes

    def fill(
        self,
        rows: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put each row's global superblocks between its pinned and its local ones.

        Example: N = 4; a request of 29 tokens has none pinned, its survivors in
        superblocks 9 and 8 and its frontier at superblock 6 of the row 40, 41, ..., 47.
        It gets the table [9, 8, 46, 47] and the length 29 - (6 - 2) * 4 = 13.

        Args:
            rows: [R] int64, rows of the request table.
            block_table: [R, P] int32, vLLM's rows, indexed by logical position // N.
            seq_lens: [R] int32, tokens computed after the step.

        Returns:
            [R, width] int32 superblocks and [R] int32 tokens held, views.
        """
        tables, lengths = self.tables[: len(rows), :width], self.lengths[: len(rows)]
        own = self.requests
        survivors = own.global_blocks, own.num_global, own.skip, own.pinned
        step = rows, block_table, seq_lens
        page_tables(tables, lengths, *step, *survivors, own.block_size)
        return tables, lengths


class EqualTier(Tier):
    """All heads hold the same number of tokens, each in its own stock pages.

    Args:
        is_captured: the attention of a step may be the replay of a graph.
    """

    def __init__(
        self,
        requests: RequestTable,
        pool: PagePool,
        tables: PhysicalTables,
        is_captured: bool = False,
    ) -> None:
        super().__init__(requests, pool)
        self.tables, self.is_captured = tables, is_captured
        self._head = torch.arange(self.num_heads + 1, device=requests.device)

    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        self.requests.num_global.index_fill_(0, index, 0)

    def starts(self, index: torch.Tensor) -> torch.Tensor:
        return self.requests.num_global[index, None] * self._head

    def numbers(self, events: Sequence[CompactEvent]) -> dict[str, Integers]:
        return super().numbers(events) | {
            "blocks": padded([e.source_blocks + e.local_blocks for e in events]),
            "num_pages": [len(event.source_blocks) for event in events],
        }

    def longest(self, event: CompactEvent) -> int:
        block_size = self.pool.block_size
        return len(event.source_blocks) * block_size + event.local_tokens(block_size)

    def held(
        self, events: Sequence[CompactEvent], sent: Mapping[str, torch.Tensor]
    ) -> HeldPages:
        pages = self.pool.own_pages(sent["blocks"]).flatten(1, 2)
        return HeldPages(
            pages=pages,
            num_pages=sent["num_pages"][:, None].expand(pages.shape[:2]),
            num_local=sent["num_local"],
            max_tokens=max(map(self.longest, events)),
        )

    def quota(self, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        """Return as many pages for every head as the event has destinations."""
        dest = batch.sent["dest"]
        return dest.new_full(keep.shape[:2], dest.shape[1])

    def assign(self, batch: Batch, quota: torch.Tensor) -> PageLists:
        """Return each head's own pages of the destination superblocks."""
        dest = batch.sent["dest"]
        pages = self.pool.own_pages(dest).flatten(1, 2)
        first = (self._head * dest.shape[1]).expand(len(dest), -1)
        unmoved = None  # every page keeps its owner and place in the list
        if any(
            event.dest_blocks != event.source_blocks[: len(event.dest_blocks)]
            for event in batch.events
        ):
            before = batch.held.pages[..., : pages.shape[-1]]
            unmoved = (pages == before).flatten(1)
        return PageLists(first, pages.flatten(1), unmoved)

    def metadata(self, step: Step) -> StepMetadata:
        common, has_survivors = step.metadata, step.is_real and bool(len(self.requests))
        if not (has_survivors or self.is_captured):
            return StepMetadata(common)
        rows = self.requests.rows(step.request_ids, common.num_reqs)
        upper, max_seq_len = common.seq_lens_cpu_upper_bound, common.max_seq_len
        if has_survivors:
            held = upper.numpy() - self.requests.dropped_tokens_cpu[rows]
            upper = torch.from_numpy(np.ascontiguousarray(held))
            max_seq_len = int(held.max())
        tables, lengths = self.tables.fill(
            to_device(rows, self.requests.device),
            common.block_table_tensor,
            common.seq_lens,
            width=-(-max_seq_len // self.requests.block_size),
        )
        return StepMetadata(
            common.replace(
                block_table_tensor=tables,
                seq_lens=lengths,
                seq_lens_cpu_upper_bound=upper,
                max_seq_len=max_seq_len,
                _num_computed_tokens_cache=None,
            )
        )

    def warm_up(self, num_columns: int) -> None:
        row = to_device([self.requests.null_row], self.requests.device)
        nothing = torch.zeros(1, 1, dtype=torch.int32, device=self.requests.device)
        self.tables.fill(row, nothing, nothing[0], 1)
