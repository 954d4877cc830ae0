"""The tier of heads of different lengths: each head has a page list of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists, assign_pages
from vllm_kvpolicy.kernels.page_quota import page_quota
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.base import StepMetadata, Tier, block_table
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection
from vllm_kvpolicy.worker.tiers.ragged_step import FoldedTables, Folder


class RaggedTier(Tier):
    """Every head holds its own number of pages, on pages of any head and layer.

    Where pages cannot leave their layer (`PagePool.spans_layers`), each layer shares
    out its own part of the superblocks.

    Args:
        requests: superblocks and frontiers by request.
        pool: the pages of the KV cache.
        lists: global pages of each head.
        tables: what attention reads in a step.
        is_captured: the attention of a step may be the replay of a graph.
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
        self.lists, self.folder = lists, Folder(requests, lists, tables)
        self.num_groups = pool.num_groups
        self.is_captured, self.selection, self.exact = is_captured, selection, exact

    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        """Forget what the rows held."""
        self.lists.clear(rows, index)

    def starts(self, index: torch.Tensor) -> torch.Tensor:
        """Return [E, n + 1] int64; see `Tier`."""
        return self.lists.first[index].long()

    def held(
        self, events: Sequence[CompactEvent], rows: Sequence[int], index: torch.Tensor
    ) -> HeldPages:
        """Return what the requests hold before their events."""
        block_size, to_device = self.pool.block_size, self.requests.to_device
        recent = [event.leaving_blocks + event.local_blocks for event in events]
        leaving = [len(event.leaving_blocks) for event in events]
        num_local = [event.local_tokens(block_size) for event in events]
        most = self.lists.longest(rows)
        width = int(np.max(most + [len(blocks) for blocks in recent]))
        sizes = (most + leaving) * block_size + num_local
        which = torch.arange(len(events), device=index.device)
        count = torch.empty(
            (1, len(events), self.num_heads), dtype=torch.int32, device=index.device
        )
        pages = count.new_empty((*count.shape, width))
        skip = torch.zeros_like(self.requests.frontier_blocks)
        blocks = block_table(recent, self.requests).int()
        self.lists.expand(pages, count, which, index, blocks, skip)
        return HeldPages(
            pages=pages[0].long(),
            num_pages=count[0] + to_device(leaving)[:, None],
            num_local=to_device(num_local),
            max_tokens=int(sizes.max()),
        )

    def quota(self, batch: Batch, counts: torch.Tensor) -> torch.Tensor:
        """Round the policy's choice to whole pages that fill the destinations.

        A dynamic policy may leave some empty, except where pages cannot leave their
        layer.
        """
        events, held = batch.events, batch.held
        block_size, per_group = self.pool.block_size, self.num_heads // self.num_groups
        num_dest = self.requests.to_device([len(e.dest_blocks) for e in events])
        pinned = [min(e.sinks, e.frontier_blocks * block_size) for e in events]
        floor = -(-self.requests.to_device(pinned) // block_size)
        shape = (len(events) * self.num_groups, per_group)
        floors = floor[:, None].expand(counts.shape).reshape(shape)
        total = (num_dest * per_group).repeat_interleave(self.num_groups)
        if batch.policy.dynamic and self.num_groups == 1:
            # One page at least, so that an event always has a destination.
            wanted = (-(-counts // block_size)).sum(-1).clamp(min=1)
            total = torch.minimum(total, wanted)
        quota = page_quota(
            counts.reshape(shape),
            torch.minimum(floors, held.num_pages.reshape(shape)),
            held.num_pages.reshape(shape),
            total,
            block_size,
            most=held.max_tokens,
        )
        return quota.view(counts.shape)

    def assign(self, batch: Batch, quota: torch.Tensor) -> PageLists:
        """Share the pages of the destination superblocks out among the heads."""
        held = batch.held
        dest = self.requests.to_device([event.dest_blocks for event in batch.events])
        num_events, num_dest = dest.shape
        groups, per_group = self.num_groups, self.num_heads // self.num_groups
        # Superblock-major: the first cells are those of the first superblocks.
        arena = self.pool.own_pages(dest).view(num_events, groups, per_group, num_dest)
        arena = arena.transpose(-1, -2).flatten(0, 1).flatten(1)
        shape = (num_events * groups, per_group)
        lists = assign_pages(
            held.pages.view(*shape, -1),
            held.num_pages.reshape(shape),
            self._cells(held.pages, dest).view(*shape, -1),
            arena,
            quota.reshape(shape),
        )
        return self._joined(lists, num_events)

    def _cells(self, pages: torch.Tensor, dest: torch.Tensor) -> torch.Tensor:
        """Return [E, n, P] places of pages in their event's arena, -1 outside."""
        num_events, num_dest = dest.shape
        num_heads, num_blocks = self.pool.num_heads, self.pool.num_blocks
        where = torch.full((num_blocks,), -1, device=dest.device)
        order = torch.arange(dest.numel(), device=dest.device)
        found = where.scatter(0, dest.flatten(), order)[pages // num_heads % num_blocks]
        event = torch.arange(num_events, device=dest.device)[:, None, None]
        mine = (found >= 0) & (found // num_dest == event)
        # Which head's stock page it is: its layer, where ids span layers, and head.
        layer = pages // (num_heads * num_blocks)
        stock = layer * num_heads + pages % num_heads
        per_group = self.num_heads // self.num_groups
        return torch.where(mine, found % num_dest * per_group + stock, -1)

    def _joined(self, lists: PageLists, num_events: int) -> PageLists:
        """Return one list per event where the layers shared out their own parts."""
        if self.num_groups == 1:
            return lists
        size = lists.pages.shape[-1]
        group = torch.arange(self.num_groups, device=lists.pages.device)[:, None]
        first = lists.first.view(num_events, self.num_groups, -1) + group * size
        last = first[:, -1, -1:]
        return PageLists(
            torch.cat([first[..., :-1].flatten(1), last], dim=-1),
            lists.pages.view(num_events, -1),
            None if lists.unmoved is None else lists.unmoved.view(num_events, -1),
        )

    def commit(self, batch: Batch, lists: PageLists) -> None:
        """Remember the lists, and look at their pages where queries choose."""
        self.lists.update(batch.rows, batch.index, lists.first, lists.pages)
        if self.selection is not None:
            self.selection.update(batch.rows, batch.events, lists.pages)

    def metadata(self, step: Step) -> StepMetadata:
        """Return vLLM's metadata with page tables per head; see `Tier`."""
        has_own_pages = len(self.requests) or self.exact is not None
        is_replayed = self.is_captured and step.metadata.max_query_len == 1
        if not ((step.is_real and has_own_pages) or is_replayed):
            return StepMetadata(step.metadata)
        held, exact = self.folder.fold(step.metadata, step.request_ids), None
        if self.exact is not None and step.is_real:
            exact = self.exact
            held = replace(held, ends=exact.ends(step))
        if self.selection is None:
            return StepMetadata(step.metadata, held, exact)
        selected = self.selection.narrow(step.metadata, step.request_ids, held)
        return StepMetadata(step.metadata, selected, exact)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Fill the rows of these requests again in the next step."""
        self.folder.forget(request_ids)

    def warm_up(self, num_columns: int) -> None:
        """Fold a dummy batch, and score a page where queries choose."""
        self.folder.warm_up(num_columns)
        if self.selection is not None:
            self.selection.warm_up()
