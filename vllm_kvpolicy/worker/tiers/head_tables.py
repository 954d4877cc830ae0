"""Page lists per (request, layer, KV head), for heads of different lengths.

The lists of a request lie end to end, so that memory grows with the pages held and not
with the longest head.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvpolicy.kernels.page_tables import enter_page_lists, head_page_tables
from vllm_kvpolicy.policies.ranks import ONE_RANK, Ranks
from vllm_kvpolicy.worker.transfer import HostCopy


class HeadTables:
    """Global pages of every head of every request, on the device.

    The last row belongs to no request and has empty lists.

    Example: three heads that hold pages [4, 7], [] and [2, 9, 1] have the row
    [4, 7, 2, 9, 1, ...] of `pages` and the row [0, 2, 2, 5] of `first`.

    Args:
        num_requests: requests that may be live at once.
        max_global_blocks: most superblocks of survivors of one request.
        own_page: [n] int64, id of each head's page of superblock 0, n = L * H.
        stride: distance in ids between a head's pages of neighbouring superblocks.
        device: where the tables live.
        ranks: which hold the same superblocks.

    Attributes:
        pages: [num_requests + 1, max_global_blocks * n] int32 page ids.
        first: [num_requests + 1, n + 1] int32, where each head's list starts and ends.
    """

    def __init__(
        self,
        num_requests: int,
        max_global_blocks: int,
        own_page: torch.Tensor,
        stride: int,
        device: torch.device,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        num_heads, size = len(own_page), num_requests + 1
        self.ranks = ranks
        self.own_page, self.stride = own_page, stride
        self.pages = torch.zeros(
            (size, max_global_blocks * num_heads), dtype=torch.int32, device=device
        )
        self.first = torch.zeros(
            (size, num_heads + 1), dtype=torch.int32, device=device
        )
        # By row, pages of the longest list and of all, on the rank that has most.
        self._counts = np.zeros((2, size), dtype=np.int64)
        self._arriving: dict[int, tuple[HostCopy, int]] = {}

    @staticmethod
    def nbytes(num_requests: int, max_global_blocks: int, num_heads: int) -> int:
        """Return the bytes of the tables on the device, int32 all of them."""
        return 4 * num_requests * (max_global_blocks * num_heads + num_heads + 1)

    def clear(self, rows: Sequence[int], index: torch.Tensor) -> None:
        """Empty the lists in rows that a new request takes over."""
        self.first.index_fill_(0, index, 0)
        self._counts[:, list(rows)] = 0  # sync-ok: numpy
        for row in rows:
            self._arriving.pop(row, None)

    def update(
        self,
        rows: Sequence[int],
        index: torch.Tensor,
        first: torch.Tensor,
        pages: torch.Tensor,
    ) -> HostCopy:
        """Replace the lists of some requests.

        Args:
            rows: of the requests, on the host.
            index: [E] int64, the same on the device.
            first: [E, n + 1] int64.
            pages: [E, C] int64 page ids.

        Returns:
            [2, E] pages of each request's longest list, and of all its lists, on the
            rank that has most: all ranks lay out the same number of tokens.
        """
        lists = index, first, pages
        own = enter_page_lists(self.pages, self.first, *lists)
        counts = HostCopy(self.ranks.most(own))
        self._arriving |= {row: (counts, n) for n, row in enumerate(rows)}
        return counts

    def longest(self, rows: Sequence[int]) -> np.ndarray:
        """Return [E] pages of each request's longest list on any rank.

        Waits for the last update.

        On a GPU that update belongs to an event that ended long before the next one.
        """
        return self._arrived(rows)[0]

    def held(self, rows: Sequence[int]) -> np.ndarray:
        """Return [E] pages of all lists of each request; waits likewise."""
        return self._arrived(rows)[1]

    def _arrived(self, rows: Sequence[int]) -> np.ndarray:
        for row in rows:
            if row in self._arriving:
                values, place = self._arriving.pop(row)
                self._counts[:, row] = values.read()[:, place]
        return self._counts[:, list(rows)]

    def most(self, rows: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return [R] upper bounds on the pages of each request's lists; does not wait.

        Args:
            rows: [R] rows of the table.
            otherwise: [R] bounds for requests whose last update is still running.
        """
        here = [row for row, (values, _) in self._arriving.items() if values.is_here()]
        self.longest(here)
        unknown = np.isin(rows, list(self._arriving))
        return np.where(unknown, otherwise, self._counts[0, rows])

    def expand(
        self,
        tables: torch.Tensor,
        offsets: torch.Tensor,
        which: torch.Tensor,
        rows: torch.Tensor,
        blocks: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Put global pages in front of local ones; see `head_page_tables_ref`."""
        lists = self.pages, self.first, self.own_page
        head_page_tables(
            tables, offsets, which, rows, blocks, skip, *lists, self.stride
        )
