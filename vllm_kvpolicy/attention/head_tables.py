"""Page lists per (slot, layer, KV head), for heads of different lengths.

Written by attention.layouts at events, read by it and by the folded attention of each
step. The lists of a request lie one behind the other, so that memory follows the pages
held and not the longest head.
Process: worker
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_kvpolicy.attention.staging import to_host


class HeadTables:
    """Global pages of every head of every slot, on the device.

    The last slot belongs to nobody and has empty lists.

    Args:
        num_slots: requests that may be live at once.
        max_global_blocks: most superblocks of survivors of one request.
        own_page: [n] int64, id of each head's page of superblock 0, n = L * H.
        stride: distance in ids between a head's pages of neighbouring superblocks.
        device: where the tables live.

    Attributes:
        pages: [slots + 1, max_global_blocks * n] int32 page ids.
        first: [slots + 1, n + 1] int32, where each head's list starts and ends.
        longest: [slots + 1] pages of the longest list, host memory.
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
        self.longest = np.zeros(size, dtype=np.int64)

    @staticmethod
    def nbytes(num_slots: int, max_global_blocks: int, num_heads: int) -> int:
        """Return the bytes of the tables on the device, int32 all of them."""
        return 4 * num_slots * (max_global_blocks * num_heads + num_heads + 1)

    def clear(self, slots: Sequence[int], index: torch.Tensor) -> None:
        """Empty the lists of slots that a new request takes over."""
        self.first[index] = 0
        self.longest[list(slots)] = 0

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
        self.longest[list(slots)] = to_host(first.diff(dim=-1).amax(-1))

    def counts(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [R, n] int32, global pages of each head of slots [R] int64."""
        return self.first[rows].diff(dim=-1)

    def expand(
        self, rows: torch.Tensor, blocks: torch.Tensor, skip: torch.Tensor, width: int
    ) -> torch.Tensor:
        """Put each head's global pages in front of its own pages of local superblocks.

        Args:
            rows: [R] int64, slots.
            blocks: [R, P] integer superblock ids.
            skip: [R] integer, leading entries of `blocks` that are not local.
            width: columns to fill.

        Returns:
            [R, n, width] int32 page ids; any valid id behind the last page.
        """
        num_rows, num_heads = len(rows), len(self.own_page)
        first = self.first[rows]
        count = first.diff(dim=-1)[..., None]
        column = torch.arange(width, dtype=torch.int32, device=rows.device)
        entry = (first[:, :-1, None] + column).clamp_max(self.pages.shape[-1] - 1)
        pages = self.pages[rows].gather(1, entry.flatten(1).long())
        local = (column - count + skip[:, None, None]).clamp(0, blocks.shape[-1] - 1)
        own = blocks.gather(1, local.flatten(1).long()).view(num_rows, num_heads, width)
        own = own * self.stride + self.own_page[:, None]
        return torch.where(column < count, pages.view_as(own), own.int())
