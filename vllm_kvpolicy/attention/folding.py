"""KV heads folded into the batch: attention over heads of different lengths.

Every (request, KV head) becomes a row of a stock paged kernel with one KV head and G
query heads, its own page list and its own length. Built once per step by the metadata
builder, used by the attention implementation of each layer.
Process: worker
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvpolicy.attention.head_tables import HeadTables
from vllm_kvpolicy.attention.slots import SlotTable
from vllm_kvpolicy.attention.staging import to_device

SPARE_PAGES = 8  # columns that requests may grow into before tables are built anew


@dataclass(frozen=True)
class FoldedBatch:
    """Page tables of a step.

    Args:
        tables: [L, R * H, P] int32 page ids; rows in the order (request, KV head) where
            every request has one query token, so that folding is a view, and in the
            order (KV head, request) elsewhere.
        lengths: [L, R * H] int32, tokens that each row holds, this step's included.
        query_start: [R * H + 1] int32, first query token of each row.
        max_length: no row holds more.
        num_tokens: query tokens of the step, T.
        by_request: rows are in the order (request, KV head).
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    query_start: torch.Tensor
    max_length: int
    num_tokens: int
    by_request: bool


@dataclass
class _Built:
    """Tables of a batch, which later steps of the same batch bring up to date.

    Args:
        batch: requests in row order.
        num_blocks: [R] entries of each row of vLLM's block table, host memory.
        rows: [R] slots, host memory.
        other_pages: [R] pages of a row beside those of its blocks, host memory: of its
            longest head, less the blocks below its frontier.
        pages: [L, R, H, P] int32 page ids.
        offsets: [L, R, H] int32, tokens held less logical length.
        starts: [R * H + 1] int32, 0, 1, 2...
    """

    batch: tuple[str, ...]
    num_blocks: np.ndarray
    rows: np.ndarray
    other_pages: np.ndarray
    pages: torch.Tensor
    offsets: torch.Tensor
    starts: torch.Tensor

    def fits(self, batch: tuple[str, ...], num_blocks: np.ndarray) -> bool:
        """Whether these are tables of the batch with room for its blocks."""
        if batch != self.batch or len(num_blocks) != len(self.num_blocks):
            return False
        return (num_blocks + self.other_pages).max() <= self.pages.shape[-1]


class Folder:
    """Builds the tables of a step, anew only where a page list has changed.

    Args:
        slots: frontiers.
        tables: global pages of each head.
        num_layers: L.
    """

    def __init__(self, slots: SlotTable, tables: HeadTables, num_layers: int) -> None:
        self.slots, self.tables, self.num_layers = slots, tables, num_layers
        self.num_heads = len(tables.own_page) // num_layers
        self._built: _Built | None = None

    def forget(self) -> None:
        """Build new tables at the next step: page lists or slots have changed."""
        self._built = None

    def fold(self, common: Any, request_ids: Sequence[str]) -> FoldedBatch:
        """Return the tables of a step.

        Args:
            common: vLLM's CommonAttentionMetadata, logical.
            request_ids: requests of the batch in row order.
        """
        num_rows, num_tokens = common.num_reqs, common.num_actual_tokens
        by_request = num_tokens == num_rows
        held = common.seq_lens_cpu_upper_bound.numpy()
        built = self._up_to_date(
            common, tuple(request_ids), -(-held // self.slots.block_size)
        )
        tables, starts = built.pages, built.starts
        lengths = common.seq_lens[:, None] + built.offsets
        if not by_request:
            tables, lengths = tables.transpose(1, 2), lengths.transpose(1, 2)
            head = torch.arange(self.num_heads, device=starts.device, dtype=torch.int32)
            starts = common.query_start_loc[:num_rows] + head[:, None] * num_tokens
            end = starts.new_full((1,), self.num_heads * num_tokens)
            starts = torch.cat([starts.flatten(), end])
        return FoldedBatch(
            tables=tables.flatten(1, 2),
            lengths=lengths.flatten(1),
            query_start=starts,
            max_length=tables.shape[-1] * self.slots.block_size,
            num_tokens=num_tokens,
            by_request=by_request,
        )

    def _up_to_date(
        self, common: Any, batch: tuple[str, ...], num_blocks: np.ndarray
    ) -> _Built:
        """Return the batch's tables; rows that started a page are read again."""
        built = self._built
        if built is None or not built.fits(batch, num_blocks):
            self._built = self._build(common, batch, num_blocks)
            return self._built
        changed = np.flatnonzero(num_blocks != built.num_blocks)
        if len(changed):
            rows, width = built.rows[changed], built.pages.shape[-1]
            pages = self._expanded(common, changed, rows, width)
            built.pages[:, to_device(changed, self.slots.device)] = pages
            built.num_blocks = num_blocks
        return built

    def _build(
        self, common: Any, batch: tuple[str, ...], num_blocks: np.ndarray
    ) -> _Built:
        slots = self.slots
        rows_host = slots.rows(batch, common.num_reqs)
        rows = to_device(rows_host, slots.device)
        frontier = slots.frontier_blocks[rows, None]
        offsets = (self.tables.counts(rows) - frontier) * slots.block_size
        other = self.tables.longest[rows_host] - slots.frontier_blocks_cpu[rows_host]
        width = int((num_blocks + other).max()) + SPARE_PAGES
        shape = (len(rows), self.num_layers, self.num_heads)
        count = len(rows) * self.num_heads + 1
        return _Built(
            batch=batch,
            num_blocks=num_blocks,
            rows=rows_host,
            other_pages=other,
            pages=self._expanded(common, np.arange(len(rows)), rows_host, width),
            offsets=offsets.view(shape).transpose(0, 1),
            starts=torch.arange(count, dtype=torch.int32, device=slots.device),
        )

    def _expanded(
        self, common: Any, which: np.ndarray, slots_of: np.ndarray, width: int
    ) -> torch.Tensor:
        """Return [L, r, H, width] int32 page lists of some rows of the batch."""
        device = self.slots.device
        index, rows = to_device(which, device), to_device(slots_of, device)
        pages = self.tables.expand(
            rows,
            common.block_table_tensor[index],
            self.slots.frontier_blocks[rows],
            width,
        )
        shape = (len(which), self.num_layers, self.num_heads, width)
        return pages.view(shape).transpose(0, 1).contiguous()


def fold_queries(
    query: torch.Tensor, num_kv_heads: int, by_request: bool
) -> torch.Tensor:
    """Return [rows, G, D] of queries [T, Hq, D]; query head h reads KV head h // G."""
    heads = query.unflatten(1, (num_kv_heads, -1))
    if by_request:
        return heads.flatten(0, 1)
    return heads.transpose(0, 1).flatten(0, 1).contiguous()


def unfold_output(folded: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Return [T, Hq, D] of [H * T, G, D], rows in the order (KV head, request)."""
    heads = folded.unflatten(0, (num_kv_heads, -1))
    return heads.transpose(0, 1).flatten(1, 2)
