"""Remembers values of each request's survivors from event to event.

These are the values that policies ask to keep per token, and true positions. They are
stored by superblock, so that the memory grows with the pool and not with the longest
request.
"""

from collections.abc import Sequence

import torch

from vllm_kvpolicy.kernels.compact_pages import read_survivors, write_survivors
from vllm_kvpolicy.worker.batch import HeldPages
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.transfer import to_device


class SurvivorMemory:
    """Keeps values of survivors, by name, and not their keys.

    They are float32 numbers per (layer, KV head, token right after an event).

    Values of global tokens follow the order of a request's page lists, laid end to end;
    each of its superblocks has a row that holds n * N of them. Values of local tokens
    are stored per request and head.

    Example: n = 2 heads, N = 4. Head 0 keeps 1 page, head 1 keeps 3, on superblocks 9
    and 6. Row 9 holds the 4 values of head 0 and the first 4 of head 1, row 6 the other
    8 of head 1.

    Args:
        num_heads: n = L * H.
        max_local_tokens: most local tokens right after an event, per head.
    """

    def __init__(
        self,
        names: Sequence[str],
        requests: RequestTable,
        num_blocks: int,
        num_heads: int,
        max_local_tokens: int,
    ) -> None:
        self.requests, self._place = requests, {name: n for n, name in enumerate(names)}
        width, device = num_heads * requests.block_size, requests.device
        self.survivors = torch.zeros(len(names), num_blocks, width, device=device)
        self.local = torch.zeros(
            (len(names), requests.null_row, num_heads, max_local_tokens), device=device
        )
        self._which: dict[tuple[str, ...], torch.Tensor] = {}

    def read(
        self,
        names: tuple[str, ...],
        index: torch.Tensor,
        first: torch.Tensor,
        max_tokens: int,
    ) -> torch.Tensor:
        """Return [K, E, n, T] values, zero for tokens since the last event.

        Args:
            names: K of those that are remembered.
            index: [E] int64, rows of the request table.
            first: [E, n + 1] integers, each head's first page before this event.
        """
        tables = self.survivors, self.local, self._rows(names)
        blocks = self.requests.global_blocks
        return read_survivors(*tables, index, first, blocks, max_tokens)

    def write(
        self,
        names: tuple[str, ...],
        index: torch.Tensor,
        values: torch.Tensor,
        sources: torch.Tensor,
        held: HeldPages,
    ) -> None:
        """Replace the values of the requests' survivors.

        The request table must already name the superblocks that they have moved to.

        Args:
            index: [E] int64, rows of the request table.
            values: [K, E, n, T] float32, before survivors are gathered.
            sources: [E, M] int64, head * T + token of each survivor in the order of
                the new page lists; negative after the last. M tokens fill the new
                superblocks.
        """
        tables = self.survivors, self.local, self._rows(names)
        counts = held.num_pages, held.num_local
        blocks = self.requests.global_blocks
        write_survivors(*tables, index, values, sources, *counts, blocks)

    def _rows(self, names: tuple[str, ...]) -> torch.Tensor:
        """Return [K] int64 rows of these values; sent to the device once."""
        if names not in self._which:
            rows = [self._place[name] for name in names]
            self._which[names] = to_device(rows, self.requests.device)
        return self._which[names]

    def clear(self, index: torch.Tensor) -> None:
        """Forget the local tokens in rows that a new request takes over.

        Its page lists are empty, so it reads no values of survivors.
        """
        self.local.index_fill_(1, index, 0)
