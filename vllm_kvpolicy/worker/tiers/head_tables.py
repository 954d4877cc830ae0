"""Page lists per (slot, layer, KV head), for heads of different lengths.

The lists of a request lie end to end, so that memory grows with the pages held and not
with the longest head.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvpolicy.kernels.head_page_tables import head_page_tables
from vllm_kvpolicy.worker.transfer import HostCopy


class HeadTables:
    """Global pages of every head of every slot, on the device.

    The last slot belongs to no request and has empty lists.

    Example: three heads that hold pages [4, 7], [] and [2, 9, 1] have the row
    [4, 7, 2, 9, 1, ...] of `pages` and the row [0, 2, 2, 5] of `first`.

    Args:
        num_slots: requests that may be live at once.
        max_global_blocks: most superblocks of survivors of one request.
        own_page: [n] int64, id of each head's page of superblock 0, n = L * H.
        stride: distance in ids between a head's pages of neighbouring superblocks.
        device: where the tables live.

    Attributes:
        pages: [slots + 1, max_global_blocks * n] int32 page ids.
        first: [slots + 1, n + 1] int32, where each head's list starts and ends.
    """

    def __init__(
        self,
        num_slots: int,
        max_global_blocks: int,
        own_page: torch.Tensor,
        stride: int,
        device: torch.device,
    ) -> None:
        num_heads, size = len(own_page), num_slots + 1
        self.own_page, self.stride = own_page, stride
        self.pages = torch.zeros(
            (size, max_global_blocks * num_heads), dtype=torch.int32, device=device
        )
        self.first = torch.zeros(
            (size, num_heads + 1), dtype=torch.int32, device=device
        )
        self._longest = np.zeros(size, dtype=np.int64)
        self._arriving: dict[int, tuple[HostCopy, int]] = {}

    @staticmethod
    def nbytes(num_slots: int, max_global_blocks: int, num_heads: int) -> int:
        """Return the bytes of the tables on the device, int32 all of them."""
        return 4 * num_slots * (max_global_blocks * num_heads + num_heads + 1)

    def clear(self, slots: Sequence[int], index: torch.Tensor) -> None:
        """Empty the lists of slots that a new request takes over."""
        self.first[index] = 0
        self._longest[list(slots)] = 0
        for slot in slots:
            self._arriving.pop(slot, None)

    def update(
        self,
        slots: Sequence[int],
        index: torch.Tensor,
        first: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        """Replace the lists of slots.

        Args:
            slots: the slots, on the host.
            index: [E] int64, the same on the device.
            first: [E, n + 1] int64.
            pages: [E, C] int64 page ids.
        """
        self.first[index] = first.int()
        self.pages[index, : pages.shape[-1]] = pages.int()
        longest = HostCopy(first.diff(dim=-1).amax(-1))
        self._arriving |= {slot: (longest, n) for n, slot in enumerate(slots)}

    def longest(self, slots: Sequence[int]) -> np.ndarray:
        """Return [E] pages of the longest list of each slot; waits for the last update.

        On a GPU that update belongs to an event that ended long before the next one.
        """
        for slot in slots:
            if slot in self._arriving:
                values, row = self._arriving.pop(slot)
                self._longest[slot] = values.read()[row]
        return self._longest[list(slots)]

    def most(self, slots: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return [R] upper bounds on the pages of each slot's lists; does not wait.

        Args:
            slots: [R] slots.
            otherwise: [R] bounds to use for slots whose last update is still running.
        """
        here = [
            slot for slot, (values, _) in self._arriving.items() if values.is_here()
        ]
        self.longest(here)
        unknown = np.isin(slots, list(self._arriving))
        return np.where(unknown, otherwise, self._longest[slots])

    def expand(
        self,
        tables: torch.Tensor,
        offsets: torch.Tensor,
        which: torch.Tensor,
        slots: torch.Tensor,
        blocks: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Put global pages in front of local ones; see `kernels.head_page_tables`."""
        lists = self.pages, self.first, self.own_page
        head_page_tables(
            tables, offsets, which, slots, blocks, skip, *lists, self.stride
        )
