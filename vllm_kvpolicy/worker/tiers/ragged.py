"""The tier of heads of different lengths: each head has a page list of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_kvpolicy.kernels.assign_pages import (
    PageLists,
    assign_pages,
    count_in_pages,
    page_quota,
)
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil
from vllm_kvpolicy.worker.hints import always_kept
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection
from vllm_kvpolicy.worker.tiers.tier import EventAnswer, StepMetadata, Tier, padded
from vllm_kvpolicy.worker.transfer import Integers


class RaggedTier(Tier):
    """Every head holds its own number of pages, on pages of any head and layer.

    Args:
        selection: selects the pages that queries read; None if they read all.
        exact: masks tokens as soon as they are dropped; None if events drop them.
    """

    def __init__(
        self,
        requests: RequestTable,
        pool: PagePool,
        lists: HeadTables,
        tables: FoldedTables,
        is_captured: bool = False,
        selection: PageSelection | None = None,
        exact: VisibleUntil | None = None,
    ) -> None:
        super().__init__(requests, pool)
        self.lists, self.tables = lists, tables
        self._nothing = torch.zeros_like(requests.skip)
        self.is_captured, self.selection, self.exact = is_captured, selection, exact

    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        self.lists.clear(rows, index)

    def starts(self, index: torch.Tensor) -> torch.Tensor:
        return self.lists.first[index].long()

    def numbers(self, events: Sequence[CompactEvent]) -> dict[str, Integers]:
        block_size = self.pool.block_size
        return super().numbers(events) | {
            "which": range(len(events)),
            "recent": padded([e.leaving_blocks + e.local_blocks for e in events]),
            "leaving": [len(event.leaving_blocks) for event in events],
            "floor": [
                min(-(-always_kept(e, block_size) // block_size), len(e.source_blocks))
                for e in events
            ],
            "total": [len(event.dest_blocks) * self.num_heads for event in events],
        }

    def longest(self, event: CompactEvent) -> int:
        """Return the tokens of the longest head; waits for the last event's."""
        block_size, pages = self.pool.block_size, len(event.leaving_blocks)
        if event.ordinal:
            row = self.requests.row_of[event.request_id]
            pages += int(self.lists.counts([row])[0, 0])
        return pages * block_size + event.local_tokens(block_size)

    def held(
        self, events: Sequence[CompactEvent], sent: Mapping[str, torch.Tensor]
    ) -> HeldPages:
        recent, longest = sent["recent"], max(map(self.longest, events))
        count = recent.new_empty((1, len(events), self.num_heads))
        width = -(-longest // self.pool.block_size)
        pages = recent.new_empty((*count.shape, width))
        alone = recent, self._nothing, self._nothing
        self.lists.expand(pages, count, sent["which"], sent["rows"], *alone)
        return HeldPages(
            pages=pages[0],
            num_pages=count[0] + sent["leaving"][:, None],
            num_local=sent["num_local"],
            max_tokens=longest,
        )

    def quota(self, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        """Round the policy's choice to whole pages that fill the destinations.

        A dynamic policy may leave some empty.
        """
        held, sent, block_size = batch.held, batch.sent, self.pool.block_size
        return page_quota(
            count_in_pages(keep, held.num_pages, block_size),
            torch.minimum(held.num_pages, sent["floor"][:, None]),
            held.num_pages,
            sent["total"],
            block_size,
            most=held.max_tokens,
            # One page at least, so that an event always has a destination.
            fills=not batch.policy.dynamic,
        )

    def assign(self, batch: Batch, quota: torch.Tensor) -> PageLists:
        return assign_pages(
            batch.held.pages,
            batch.held.num_pages,
            batch.sent["dest"],
            quota,
            self.pool.num_blocks,
            self.pool.num_heads,
        )

    def commit(self, batch: Batch, lists: PageLists) -> EventAnswer:
        """Remember the lists, and look at their pages where queries choose."""
        leaving = np.array([len(event.leaving_blocks) for event in batch.events])
        before = self.lists.counts(batch.rows)[1] + leaving * self.num_heads
        rows = batch.rows, batch.sent["rows"], batch.sent["dest"]
        after = self.lists.update(*rows, lists.first, lists.pages)
        if self.selection is not None:
            self.selection.update(batch.rows, batch.events, lists.pages)
            self.selection.add_pinned(batch.events)
        return EventAnswer(batch.events, before, after, self.num_heads)

    def metadata(self, step: Step) -> StepMetadata:
        has_own_pages = len(self.requests) or self.exact is not None
        is_replayed = self.is_captured and step.metadata.max_query_len == 1
        if not ((step.is_real and has_own_pages) or is_replayed):
            return StepMetadata(step.metadata)
        held = self.tables.fold(self.lists, step.metadata, step.request_ids)
        exact = None
        if self.exact is not None and step.is_real:
            exact = self.exact
            held = replace(held, ends=exact.ends(step))
        if self.selection is None:
            return StepMetadata(step.metadata, held, exact)
        selected = self.selection.narrow(step.metadata, step.request_ids, held)
        return StepMetadata(step.metadata, selected, exact)

    def forget(self, request_ids: Iterable[str]) -> None:
        self.tables.forget(request_ids)

    def warm_up(self, num_columns: int) -> None:
        self.tables.warm_up(self.lists, num_columns)
        if self.selection is not None:
            self.selection.warm_up()
