"""Remembers values of each request's survivors from event to event.

These are the values that policies ask to keep per token, and true positions. They are
stored by superblock, so that the memory grows with the pool and not with the longest
request.
"""

import torch

from vllm_kvpolicy.worker.batch import HeldPages
from vllm_kvpolicy.worker.request_table import RequestTable


class SurvivorMemory:
    """One float32 per (layer, KV head, token right after an event).

    Values of global tokens follow the order of a request's page lists, laid end to end;
    each of its superblocks has a row that holds n * N of them. Values of local tokens
    are stored per request and head.

    Example: n = 2 heads, N = 4. Head 0 keeps 1 page, head 1 keeps 3, on superblocks 9
    and 6. Row 9 holds the 4 values of head 0 and the first 4 of head 1, row 6 the other
    8 of head 1.

    Args:
        requests: superblocks of each request.
        num_blocks: superblocks of the pool.
        num_heads: n = L * H.
        max_local_tokens: most local tokens right after an event, per head.
    """

    def __init__(
        self,
        requests: RequestTable,
        num_blocks: int,
        num_heads: int,
        max_local_tokens: int,
    ) -> None:
        self.requests = requests
        width, device = num_heads * requests.block_size, requests.device
        self.survivors = torch.zeros(num_blocks, width, device=device)
        self.local = torch.zeros(
            requests.null_row, num_heads, max_local_tokens, device=device
        )

    @staticmethod
    def nbytes_of(
        num_requests: int,
        num_blocks: int,
        num_heads: int,
        block_size: int,
        max_local_tokens: int,
    ) -> int:
        """Return the bytes that an object of these sizes takes on the device."""
        local = num_requests * max_local_tokens
        return 4 * num_heads * (num_blocks * block_size + local)

    def read(
        self, index: torch.Tensor, first: torch.Tensor, max_tokens: int
    ) -> torch.Tensor:
        """Return [E, n, T] values, zero for tokens since the last event.

        Args:
            index: [E] int64, rows of the request table.
            first: [E, n + 1] int64, first survivor of each head before this event.
            max_tokens: T.
        """
        token = torch.arange(max_tokens, device=index.device)
        count = first.diff(dim=-1)[..., None]
        blocks, width = (
            self.requests.global_blocks[index].long(),
            self.survivors.shape[-1],
        )
        last = blocks.shape[-1] * width - 1
        entry = (first[:, :-1, None] + token).clamp_max(last).flatten(1)
        row = blocks.gather(1, entry.div(width, rounding_mode="floor"))
        survivors = self.survivors.view(-1)[row * width + entry % width]
        entry = token - count
        local = self.local[index]
        known = (entry >= 0) & (entry < local.shape[-1])
        local = local.gather(-1, entry.clamp(0, local.shape[-1] - 1))
        survivors = survivors.view(entry.shape)
        return torch.where(entry < 0, survivors, torch.where(known, local, 0.0))

    def write(
        self,
        index: torch.Tensor,
        values: torch.Tensor,
        sources: torch.Tensor,
        held: HeldPages,
        block_size: int,
    ) -> None:
        """Replace the values of the requests' survivors.

        The request table must already name the superblocks that they have moved to.

        Args:
            index: [E] int64, rows of the request table.
            values: [E, n, T] float32, before survivors are gathered.
            sources: [E, M] int64, head * T + token of each survivor in the order of
                the new page lists; negative after the last. M tokens fill the new
                superblocks.
            held: what the requests held.
            block_size: N, tokens per page.
        """
        kept = values.flatten(1).gather(1, sources.clamp_min(0))
        kept = torch.where(sources < 0, 0.0, kept)
        rows = kept.unflatten(1, (-1, self.survivors.shape[-1]))
        blocks = self.requests.global_blocks[index, : rows.shape[1]].long()
        self.survivors[blocks] = rows
        token = torch.arange(self.local.shape[-1], device=index.device)
        place = held.num_pages[..., None] * block_size + token
        local = values.gather(-1, place.clamp_max(values.shape[-1] - 1))
        is_local = token < held.num_local[:, None, None]
        self.local[index] = torch.where(is_local, local, 0.0)

    def clear(self, index: torch.Tensor) -> None:
        """Forget the local tokens in rows that a new request takes over.

        Its page lists are empty, so it reads no values of survivors.
        """
        self.local.index_fill_(0, index, 0)
