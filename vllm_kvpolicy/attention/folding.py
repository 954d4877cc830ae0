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
        self._key: tuple[Any, ...] | None = None

    def forget(self) -> None:
        """Build new tables at the next step: page lists or slots have changed."""
        self._key = None

    def fold(self, common: Any, request_ids: Sequence[str]) -> FoldedBatch:
        """Return the tables of a step.

        Args:
            common: vLLM's CommonAttentionMetadata, logical.
            request_ids: requests of the batch in row order.
        """
        num_rows, num_tokens = common.num_reqs, common.num_actual_tokens
        by_request = num_tokens == num_rows
        held = common.seq_lens_cpu_upper_bound.numpy()
        blocks = -(-held // self.slots.block_size)
        key = (by_request, blocks.tobytes(), *request_ids)
        if key != self._key:
            self._build(common, request_ids, blocks, by_request)
            self._key = key
        lengths = common.seq_lens.view((1, -1, 1) if by_request else (1, 1, -1))
        starts = self._query_start
        if not by_request:
            head = torch.arange(self.num_heads, device=starts.device, dtype=torch.int32)
            starts = common.query_start_loc[:num_rows] + head[:, None] * num_tokens
            end = starts.new_full((1,), self.num_heads * num_tokens)
            starts = torch.cat([starts.flatten(), end])
        return FoldedBatch(
            tables=self._tables,
            lengths=(self._offsets + lengths).flatten(1),
            query_start=starts,
            max_length=self._tables.shape[-1] * self.slots.block_size,
            num_tokens=num_tokens,
            by_request=by_request,
        )

    def _build(
        self,
        common: Any,
        request_ids: Sequence[str],
        num_blocks: np.ndarray,
        by_request: bool,
    ) -> None:
        """Expand the page lists of a batch, and what lengths differ by from logical."""
        slots, tables = self.slots, self.tables
        rows_host = slots.rows(request_ids, common.num_reqs)
        rows = to_device(rows_host, slots.device)
        frontier = slots.frontier_blocks[rows]
        local = num_blocks - slots.frontier_blocks_cpu[rows_host]
        width = int((local + tables.longest[rows_host]).max())
        pages = tables.expand(rows, common.block_table_tensor, frontier, width)
        offsets = (tables.counts(rows) - frontier[:, None]) * slots.block_size
        shape = (len(rows), self.num_layers, self.num_heads)
        order = (1, 0, 2) if by_request else (1, 2, 0)
        pages = pages.view(*shape, width).permute(*order, 3)
        self._tables = pages.reshape(self.num_layers, -1, width)
        self._offsets = offsets.view(shape).permute(order).contiguous()
        count = len(rows) * self.num_heads + 1
        self._query_start = torch.arange(count, dtype=torch.int32, device=rows.device)


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
