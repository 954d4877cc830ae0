"""Selects the global pages that each decoding query reads.

A query selects if it belongs to a generated token and its request has had an event;
other queries read everything that is held. Several generated tokens of a request in one
step, as after a preemption, are cut into rows of one token each, so that every token
reads what it read when it was generated, whatever else the step computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.kernels.page_bounds import best_pages, page_bounds
from vllm_kvpolicy.policies.selections.quest import Quest
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.sizes import own_shape
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch, fold_order, fold_starts
from vllm_kvpolicy.worker.transfer import to_device


@dataclass(frozen=True)
class SelectedBatch:
    """A folded batch in which some rows read only selected global pages.

    S counts the rows of the step after cutting; see the module.

    Args:
        folded: what is held, by row of `folded.tables`; all else is of the S rows.
        bounds: [2, P, D], see `kernels.page_bounds`. Of an FP8 cache, of keys as they
            are stored: a layer's scale is above zero and the same for all its pages, so
            it changes no choice.
        rows: [S * H] int64, rows of `folded.tables`; None where none is cut.
        tokens: the query of each row that selects, any token of others: the first S, or
            [S] int64.
        num_global: [L, S * H] int64, global pages of each row.
        num_read: [L, S * H] int64, how many of them it reads.
        scored: [L, S * H] int32, pages that need scores: none of rows that read all.
    """

    folded: FoldedBatch
    quest: Quest
    bounds: torch.Tensor
    block_size: int
    rows: torch.Tensor | None
    tokens: torch.Tensor | slice
    num_global: torch.Tensor
    num_read: torch.Tensor
    scored: torch.Tensor

    def of_layer(self, layer: int, query: torch.Tensor) -> FoldedBatch:
        """Return what one layer reads.

        Args:
            query: [T, Hq, D] model dtype, post-RoPE.
        """
        width = -(-self.folded.max_length // self.block_size)
        tables = self.folded.tables[layer, :, :width]
        if self.rows is not None:
            tables = tables[self.rows]
        scored = self.scored[layer]
        queries = query[self.tokens].reshape(len(scored), -1, query.shape[-1])
        scores = self.quest.scores(queries, tables, scored, self.bounds)
        counts = self.num_global[layer], self.num_read[layer]
        best, lengths = best_pages(tables, scores, *counts), self.folded.lengths[layer]
        return replace(self.folded, tables=best, lengths=lengths)


class PageSelection:
    """Keeps the bounds of all pages, and which requests' queries select.

    Args:
        quest: chooses pages; requests cannot change its options, so it is the same one
            for all policies of a server.
        policies: names of those that have a selection.
        group: G, query heads per KV head.
    """

    def __init__(
        self,
        quest: Quest,
        policies: Sequence[str],
        requests: RequestTable,
        pool: PagePool,
        group: int,
    ) -> None:
        self.quest, self.policies, self.requests = quest, frozenset(policies), requests
        self.pool, self.group = pool, group
        size = requests.null_row + 1
        self._selects = np.zeros(size, dtype=bool)
        self._prompt_tokens = np.zeros(size, dtype=np.int64)
        shape, device = (2, len(pool.pages), pool.head_dim), pool.pages.device
        self.bounds = torch.zeros(shape, dtype=pool.dtype, device=device)

    @classmethod
    def of_server(
        cls, config: KVPolicyConfig, layer: Any, requests: RequestTable, pool: PagePool
    ) -> "PageSelection | None":
        """Build the selection of a server, None where no query selects."""
        names = selecting(config)
        if not names:
            return None
        policy = config.resolved(names[0])
        assert policy.info.selection is not None  # `names` says so
        quest = policy.build(policy.info.selection)
        return cls(quest, names, requests, pool, layer.num_heads // layer.num_kv_heads)

    @staticmethod
    def page_bytes(config: KVPolicyConfig, vllm_config: Any) -> int:
        """Return the bytes that the bounds of one page take, 0 without a selection."""
        itemsize = vllm_config.model_config.dtype.itemsize
        bytes_of_key = own_shape(vllm_config).head_size * itemsize
        return 2 * bytes_of_key if selecting(config) else 0

    def update(
        self, rows: Sequence[int], events: Sequence[CompactEvent], pages: torch.Tensor
    ) -> None:
        """Compute the bounds of all pages of some requests, after their event.

        Args:
            events: of one policy.
            pages: [E, C] int64, the requests' page lists; any valid id on padding.
        """
        selects = events[0].policy in self.policies
        self._selects[list(rows)] = selects
        self._prompt_tokens[list(rows)] = [event.prompt_tokens for event in events]
        if selects:
            page_bounds(self.bounds, self.pool.keys[0], pages.flatten())

    def add_pinned(self, events: Sequence[CompactEvent]) -> None:
        """Compute the bounds of pinned pages, once for each request."""
        new = [event for event in events if not event.ordinal]
        blocks = {each for event in new for each in event.pinned_blocks}
        if events[0].policy not in self.policies or not blocks:
            return
        index = to_device(sorted(blocks), self.requests.device)
        pages = self.pool.own_pages(index[None])
        page_bounds(self.bounds, self.pool.keys[0], pages.flatten())

    def warm_up(self) -> None:
        """Score and choose the null page, so that the kernels are compiled."""
        dim = self.pool.head_dim
        queries = self.bounds.new_zeros(1, self.group, dim)
        page = torch.zeros(1, 1, dtype=torch.int32, device=self.requests.device)
        scores = self.quest.scores(queries, page, page[0], self.bounds)
        best_pages(page, scores, page[0].long(), page[0].long())

    def narrow(
        self, common: Any, request_ids: Sequence[str], folded: FoldedBatch
    ) -> FoldedBatch | SelectedBatch:
        """Return what a step reads; the folded batch itself if no row selects."""
        requests, block_size = self.requests, self.requests.block_size
        which = requests.rows(request_ids, common.num_reqs)
        selects = self._selects[which]
        if not selects.any():
            return folded
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        ends = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs]
        generated = np.clip(ends - self._prompt_tokens[which], 0, np.diff(starts))
        row, first, alone = cut_rows(starts, np.where(selects, generated, 0))
        later = starts[row + 1] - first[1:]
        local = (
            ends[row] - later - requests.frontier_blocks_cpu[which][row] * block_size
        )
        width = -(-folded.max_length // block_size)
        most = np.where(alone, self.quest.most_pages(local, block_size), width)
        if (most >= width).all():
            return folded
        return self._selected(folded, starts, row, first, later, local, most)

    def _selected(
        self,
        folded: FoldedBatch,
        starts: np.ndarray,
        row: np.ndarray,
        first: np.ndarray,
        *numbers: np.ndarray,
    ) -> SelectedBatch:
        """Send rows to the device; `numbers` are later, local and most, [S] each."""
        num_heads, num_tokens = self.pool.num_heads, int(starts[-1])
        block_size = self.requests.block_size
        tokens = np.minimum(first[:-1], max(num_tokens - 1, 0))
        sent = to_device(np.stack([row, *numbers, tokens]), self.requests.device)
        later, local, most = sent[1:4].repeat_interleave(num_heads, dim=1)
        rows = None
        if len(row) != len(starts) - 1:
            head = torch.arange(num_heads, dtype=torch.int32, device=sent.device)
            rows = (sent[0, :, None] * num_heads + head).flatten()
            edges = to_device(first, self.requests.device).int()
            query_start = edges.new_empty(len(row) * num_heads + 1)
            fold_starts(query_start, edges, head)
            folded = replace(
                folded,
                lengths=folded.lengths[:, rows] - later,
                query_start=query_start,
                order=fold_order(edges, num_tokens, head),
                ends=None if folded.ends is None else (folded.ends[rows] - later).int(),
            )
        num_global = (folded.lengths - local) // block_size
        num_read = torch.minimum(num_global, most)
        # Rows that read all their pages need no scores.
        scored = torch.where(num_read < num_global, num_global, 0).int()
        is_first = np.array_equal(first[:-1], np.arange(len(row)))
        return SelectedBatch(
            replace(folded, lengths=(num_read * block_size + local).int()),
            self.quest,
            self.bounds,
            block_size,
            rows,
            slice(len(row)) if is_first and len(row) <= num_tokens else sent[-1],
            num_global,
            num_read,
            scored,
        )


def selecting(config: KVPolicyConfig) -> list[str]:
    """Return the policies of a server whose queries select the pages that they read."""
    return [each.info.name for each in config.all_resolved if each.info.selection]


def cut_rows(
    starts: np.ndarray, alone: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut rows so that some of their last tokens become rows of their own.

    Example: rows of 3 and 2 tokens, starts [0, 3, 5], of which the last 2 and 0 are
    cut off: pieces of rows [0, 0, 0, 1] that start at [0, 1, 2, 3] and end at 5; the
    second and third are the tokens cut off.

    Args:
        starts: [R + 1], first token of each row, and where the last row ends.
        alone: [R], how many tokens at the end of each row become rows of their own.

    Returns:
        [S] row that each piece is of, [S + 1] first token of each piece and where the
        last ends, [S] bool, whether it is one of the tokens cut off. Rows without
        tokens stay.
    """
    counts = np.diff(starts)
    has_rest = (counts > alone) | (counts == 0)
    pieces = alone + has_rest
    row = np.repeat(np.arange(len(counts)), pieces)
    sizes, stands_alone = np.ones_like(row), np.ones(len(row), dtype=bool)
    rest = (np.cumsum(pieces) - pieces)[has_rest]
    sizes[rest] = (counts - alone)[has_rest]
    stands_alone[rest] = False  # sync-ok: numpy
    return row, starts[0] + np.r_[0, np.cumsum(sizes)], stands_alone
