"""Where the held tokens of a request lie, for heads of equal and of own lengths.

Heads are numbered through the layers: head k of n = L * H is KV head k % H of layer
k // H. All pages below a frontier are full, so a head's list needs no mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists, assign_pages
from vllm_kvpolicy.kernels.page_quota import page_quota
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.slots import SlotTable
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables


@dataclass(frozen=True)
class Held:
    """What requests hold before an event.

    Args:
        pages: [E, n, P] int64 page ids, oldest token first; any valid id on padding.
        num_pages: [E, n] int64, full pages below the new frontier.
        num_local: [E] int64, tokens at and above it.
        max_tokens: T, no head holds more.
    """

    pages: torch.Tensor
    num_pages: torch.Tensor
    num_local: torch.Tensor
    max_tokens: int


class Layout(Protocol):
    """How a server lays out the survivors of its requests."""

    def first(self, index: torch.Tensor) -> torch.Tensor:
        """Return [E, n + 1] int64: where each head's global pages start and end."""
        ...

    def clear(self, slots: Sequence[int], index: torch.Tensor) -> None:
        """Forget what the slots held; new requests take them over."""
        ...

    def held(
        self, events: Sequence[CompactEvent], slots: Sequence[int], index: torch.Tensor
    ) -> Held:
        """Return what the requests hold before their events."""
        ...

    def quota(
        self,
        events: Sequence[CompactEvent],
        held: Held,
        keep: torch.Tensor,
        may_shrink: bool,
    ) -> torch.Tensor:
        """Return [E, n] int64 global pages of each head after the event.

        Args:
            events: the events.
            held: what is held.
            keep: [E, n] int64, tokens below the frontier that the policy chose.
            may_shrink: the choice need not fill the destinations.
        """
        ...

    def place(
        self, events: Sequence[CompactEvent], held: Held, quota: torch.Tensor
    ) -> PageLists:
        """Return the page lists after the event, pages [E, C]."""
        ...

    def update(
        self, slots: Sequence[int], index: torch.Tensor, lists: PageLists
    ) -> None:
        """Remember the lists; the slot table is updated separately."""
        ...


def _blocks(rows: Sequence[Sequence[int]], slots: SlotTable) -> torch.Tensor:
    """Return [E, P] int64 superblock ids, padded with vLLM's null block."""
    width = max(map(len, rows))
    return slots.to_device([tuple(row) + (0,) * (width - len(row)) for row in rows])


class EqualLayout:
    """All heads hold the same number of tokens, each in its own stock pages."""

    def __init__(self, slots: SlotTable, pool: PagePool) -> None:
        self.slots, self.pool = slots, pool
        self.num_heads = pool.num_layers * pool.num_heads

    def first(self, index: torch.Tensor) -> torch.Tensor:
        """Return [E, n + 1] int64; see `Layout`."""
        head = torch.arange(self.num_heads + 1, device=index.device)
        return head * self.slots.num_global[index, None].long()

    def clear(self, slots: Sequence[int], index: torch.Tensor) -> None:
        """Forget what the slots held."""
        self.slots.num_global.index_fill_(0, index, 0)

    def held(
        self, events: Sequence[CompactEvent], slots: Sequence[int], index: torch.Tensor
    ) -> Held:
        """Return what the requests hold before their events."""
        block_size = self.pool.block_size
        rows = [event.source_blocks + event.local_blocks for event in events]
        num_local = [event.local_tokens(block_size) for event in events]
        num_pages = [len(event.source_blocks) for event in events]
        sizes = np.array(num_pages) * block_size + num_local
        pages = self.pool.own_pages(_blocks(rows, self.slots)).flatten(1, 2)
        return Held(
            pages=pages,
            num_pages=self.slots.to_device(num_pages)[:, None].expand(pages.shape[:2]),
            num_local=self.slots.to_device(num_local),
            max_tokens=int(sizes.max()),
        )

    def quota(
        self,
        events: Sequence[CompactEvent],
        held: Held,
        keep: torch.Tensor,
        may_shrink: bool,
    ) -> torch.Tensor:
        """Return as many pages for every head as the event has destinations."""
        num_dest = self.slots.to_device([len(e.dest_blocks) for e in events])
        return num_dest[:, None].expand(keep.shape)

    def place(
        self, events: Sequence[CompactEvent], held: Held, quota: torch.Tensor
    ) -> PageLists:
        """Return each head's own pages of the destination superblocks."""
        dest = self.slots.to_device([event.dest_blocks for event in events])
        pages = self.pool.own_pages(dest).flatten(1, 2)
        first = torch.nn.functional.pad(quota.cumsum(-1), (1, 0))
        unmoved = None
        if any(e.dest_blocks != e.source_blocks[: len(e.dest_blocks)] for e in events):
            unmoved = (pages == held.pages[..., : pages.shape[-1]]).flatten(1)
        return PageLists(first, pages.flatten(1), unmoved)

    def update(
        self, slots: Sequence[int], index: torch.Tensor, lists: PageLists
    ) -> None:
        """Nothing to do: stock pages follow from the superblocks."""


class RaggedLayout:
    """Every head holds its own number of pages, on pages of any head and layer.

    Where pages cannot leave their layer (`PagePool.spans_layers`), each layer shares
    out its own part of the superblocks.
    """

    def __init__(self, slots: SlotTable, pool: PagePool, tables: HeadTables) -> None:
        self.slots, self.pool, self.tables = slots, pool, tables
        self.num_heads = pool.num_layers * pool.num_heads
        self.num_groups = pool.num_groups

    def first(self, index: torch.Tensor) -> torch.Tensor:
        """Return [E, n + 1] int64; see `Layout`."""
        return self.tables.first[index].long()

    def clear(self, slots: Sequence[int], index: torch.Tensor) -> None:
        """Forget what the slots held."""
        self.tables.clear(slots, index)

    def held(
        self, events: Sequence[CompactEvent], slots: Sequence[int], index: torch.Tensor
    ) -> Held:
        """Return what the requests hold before their events."""
        block_size, to_device = self.pool.block_size, self.slots.to_device
        rows = [event.leaving_blocks + event.local_blocks for event in events]
        leaving = [len(event.leaving_blocks) for event in events]
        num_local = [event.local_tokens(block_size) for event in events]
        most = self.tables.longest(slots)
        width = int(np.max(most + [len(row) for row in rows]))
        sizes = (most + leaving) * block_size + num_local
        which = torch.arange(len(events), device=index.device)
        count = torch.empty(
            (1, len(events), self.num_heads), dtype=torch.int32, device=index.device
        )
        pages = count.new_empty((*count.shape, width))
        skip = torch.zeros_like(self.slots.frontier_blocks)
        blocks = _blocks(rows, self.slots).int()
        self.tables.expand(pages, count, which, index, blocks, skip)
        return Held(
            pages=pages[0].long(),
            num_pages=count[0] + to_device(leaving)[:, None],
            num_local=to_device(num_local),
            max_tokens=int(sizes.max()),
        )

    def quota(
        self,
        events: Sequence[CompactEvent],
        held: Held,
        keep: torch.Tensor,
        may_shrink: bool,
    ) -> torch.Tensor:
        """Round the policy's choice to whole pages that fill the destinations.

        Where pages cannot leave their layer, every choice fills them.
        """
        block_size, per_group = self.pool.block_size, self.num_heads // self.num_groups
        num_dest = self.slots.to_device([len(e.dest_blocks) for e in events])
        pinned = [min(e.sinks, e.frontier_blocks * block_size) for e in events]
        floor = -(-self.slots.to_device(pinned) // block_size)
        shape = (len(events) * self.num_groups, per_group)
        floors = floor[:, None].expand(keep.shape).reshape(shape)
        total = (num_dest * per_group).repeat_interleave(self.num_groups)
        if may_shrink and self.num_groups == 1:
            # One page at least, so that an event always has a destination.
            wanted = (-(-keep // block_size)).sum(-1).clamp(min=1)
            total = torch.minimum(total, wanted)
        quota = page_quota(
            keep.reshape(shape),
            torch.minimum(floors, held.num_pages.reshape(shape)),
            held.num_pages.reshape(shape),
            total,
            block_size,
            most=held.max_tokens,
        )
        return quota.view(keep.shape)

    def place(
        self, events: Sequence[CompactEvent], held: Held, quota: torch.Tensor
    ) -> PageLists:
        """Share the pages of the destination superblocks out among the heads."""
        dest = self.slots.to_device([event.dest_blocks for event in events])
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

    def update(
        self, slots: Sequence[int], index: torch.Tensor, lists: PageLists
    ) -> None:
        """Remember the lists."""
        self.tables.update(slots, index, lists.first, lists.pages)


def move_slots(
    held: Held, lists: PageLists, placed: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each survivor lies and where it goes, both [E, M] page * N + offset.

    Survivors that do not exist move slot 0 onto itself.

    Args:
        held: what is held, pages [E, n, P].
        lists: where it goes, pages [E, M / N].
        placed: [E, M] int64, head * T + token, negative behind the last.
        block_size: N.
    """
    head = placed.div(held.max_tokens, rounding_mode="floor").clamp_min(0)
    token = placed.clamp_min(0) % held.max_tokens
    entry = head * held.pages.shape[-1] + token // block_size
    source = held.pages.flatten(1).gather(1, entry) * block_size + token % block_size
    offset = torch.arange(block_size, device=placed.device)
    dest = (lists.pages[..., None] * block_size + offset).flatten(1)
    return torch.where(placed < 0, 0, source), torch.where(placed < 0, 0, dest)


def head_starts(first: torch.Tensor, num_places: int, groups: int) -> torch.Tensor:
    """Return where each head's survivors start when events lie one behind the other.

    Args:
        first: [E, n + 1] int64, of each event; the last entry is where it ends.
        num_places: M, survivors of an event at most.
        groups: sets of heads that are moved apart, n / groups heads and M / groups
            places each.

    Returns:
        [groups, E * (n / groups + 1) + 1] int64: behind the heads of an event follows a
        row of survivors that do not exist; the last entry is where the last event ends.
    """
    num_events, per_group = len(first), (first.shape[-1] - 1) // groups
    size = num_places // groups
    group = torch.arange(groups, device=first.device)[:, None]
    head = torch.arange(per_group + 1, device=first.device)
    starts = first[:, group * per_group + head] - group * size
    event = torch.arange(num_events, device=first.device)[:, None, None]
    starts = (starts + event * size).transpose(0, 1).flatten(1)
    return torch.nn.functional.pad(starts, (0, 1), value=num_events * size)
