"""The interface of a tier: what is held, quota, pages, and metadata of a step.

A server has one tier for all its requests. Only `setup` knows which one it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.protocol import CompactEvent, UsedBlocks
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.captures.visible_until import VisibleUntil
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch
from vllm_kvpolicy.worker.tiers.page_selection import SelectedBatch
from vllm_kvpolicy.worker.transfer import HostCopy, Integers


@dataclass(frozen=True)
class StepMetadata:
    """What the attention of a step reads.

    Args:
        folded: page tables per head, None where the stock metadata is all.
        exact: masks tokens as soon as they are dropped, in place of a stock kernel;
            None where a dropped token is masked at the next event.
    """

    common: Any
    folded: FoldedBatch | SelectedBatch | None = None
    exact: VisibleUntil | None = None


@dataclass(frozen=True)
class EventAnswer:
    """How many pages some requests held and hold, on its way to the host.

    Args:
        before: [E] pages of all layers and heads that what was held below the new
            frontier took, on the host.
        after: [2, E] that its survivors take, see `HeadTables.update`; on its way.
        num_heads: pages in a superblock.
    """

    events: Sequence[CompactEvent]
    before: np.ndarray
    after: HostCopy
    num_heads: int

    def read(self) -> list[tuple[CompactEvent, int, UsedBlocks]]:
        """Wait for it; return each event, the superblocks held, and the answer."""
        found = []
        pages = map(int, self.before), map(int, self.after.read()[1])
        for event, held, used in zip(self.events, *pages, strict=True):
            blocks = -(-used // self.num_heads)
            slack = blocks - used / self.num_heads
            answer = UsedBlocks(event.request_id, event.serial, blocks, slack)
            found.append((event, -(-held // self.num_heads), answer))
        return found


class Tier(ABC):
    """Lays out the survivors of a server's requests.

    Args:
        requests: superblocks and frontiers by request.
        pool: the pages of the KV cache.
    """

    def __init__(self, requests: RequestTable, pool: PagePool) -> None:
        self.requests, self.pool = requests, pool
        self.num_heads = pool.num_layers * pool.num_heads

    @abstractmethod
    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        """Forget what rows of the table held; new requests take them over.

        Args:
            rows: the rows, on the host.
            index: [E] int64, the same on the device.
        """

    @abstractmethod
    def starts(self, index: torch.Tensor) -> torch.Tensor:
        """Return [E, n + 1] int64: where each head's global pages start and end.

        Example: heads that hold 2, 0 and 3 global pages have [0, 2, 2, 5].
        """

    def numbers(self, events: Sequence[CompactEvent]) -> dict[str, Integers]:
        """Return integers of the host that events need on the device, by name."""
        block_size = self.pool.block_size
        rows = [self.requests.row_of[event.request_id] for event in events]
        local = [event.local_tokens(block_size) for event in events]
        return self.requests.numbers(rows, events) | {"num_local": local}

    @abstractmethod
    def longest(self, event: CompactEvent) -> int:
        """Return what a request's longest head holds, on any rank, before its event."""

    @abstractmethod
    def held(
        self, events: Sequence[CompactEvent], sent: Mapping[str, torch.Tensor]
    ) -> HeldPages:
        """Return what the requests hold; `sent` are `numbers` on the device."""

    @abstractmethod
    def quota(self, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        """Round a choice to whole pages.

        Args:
            keep: [E, n, T] bool, tokens that the policy chose.

        Returns:
            [E, n] int64 global pages of each head after the event.
        """

    @abstractmethod
    def assign(self, batch: Batch, quota: torch.Tensor) -> PageLists:
        """Return which pages of the destinations each head gets, pages [E, C]."""

    def commit(self, batch: Batch, lists: PageLists) -> EventAnswer | None:
        """Remember the pages of a batch, once its survivors are there.

        Returns:
            How many they are. None where heads always fill their superblocks, from
            which their pages follow.
        """
        return None

    @abstractmethod
    def metadata(self, step: Step) -> StepMetadata:
        """Return what the attention of a step reads.

        Positions, slot mapping and query layout stay logical. The metadata is vLLM's
        own outside a step and before any request has had an event, unless a graph may
        be captured or replayed: that always reads our tables.
        """

    def forget(self, request_ids: Iterable[str]) -> None:  # noqa: B027
        """Forget step tables of requests that are gone or whose pages change."""

    @abstractmethod
    def warm_up(self, num_columns: int) -> None:
        """Run the kernels of a step on a dummy batch, so that they are compiled.

        Args:
            num_columns: of vLLM's block table.
        """


def padded(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return [E][P] superblock ids, padded with vLLM's null block."""
    width = max(map(len, rows))
    return [row + (0,) * (width - len(row)) for row in rows]
