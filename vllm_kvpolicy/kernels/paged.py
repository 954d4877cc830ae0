"""Keys or values of held tokens, read in place on their pages or as a dense copy.

The worker makes them from the KV cache; `from_dense` makes them from a tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedTokens:
    """Tokens of (event, layer, KV head) rows on pages of N tokens each.

    To be read before anything moves on these pages.

    Args:
        pools: one [P, N, D] view per layer, model dtype, any strides; the same view for
            all layers where a page id names a page of any layer.
        pages: [E, L, H, C] int64, page ids of each row, oldest token first; any valid
            id on padding. Row r's token t lies at offset t % N of its page t // N.
        num_tokens: T, tokens per row, at most C * N; what lies after a row's own
            length is unspecified.
    """

    pools: Sequence[Tensor]
    pages: Tensor
    num_tokens: int

    @classmethod
    def from_dense(cls, tokens: Tensor) -> "PagedTokens":
        """Return a plain tensor [E, L, H, T, D] as rows of one page each."""
        num_rows = tokens.shape[:3].numel()
        pages = torch.arange(num_rows, device=tokens.device).view(*tokens.shape[:3], 1)
        pools = [tokens.flatten(0, 2)] * tokens.shape[1]
        paged = cls(pools, pages, tokens.shape[3])
        paged.__dict__["dense"] = tokens  # needs no copy
        return paged

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, L, H, T, D] of the copy."""
        return (*self.pages.shape[:3], self.num_tokens, self.pools[0].shape[-1])

    def by_pool(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield layers and their pool: all at once where they share one view of it."""
        views = {(pool.data_ptr(), pool.stride()) for pool in self.pools}
        step = len(self.pools) if len(views) == 1 else 1
        for first in range(0, len(self.pools), step):
            yield slice(first, first + step), self.pools[first]

    def at(self, token: Tensor) -> Tensor:
        """Return [E, L, H, F, D] copies of tokens [E, L, H, F] int64 of each row."""
        page_size = self.pools[0].shape[1]
        pages = self.pages.gather(-1, token.div(page_size, rounding_mode="floor"))
        place = token % page_size
        layers = [
            pool[pages[:, layer], place[:, layer]]
            for layer, pool in enumerate(self.pools)
        ]
        return torch.stack(layers, dim=1)

    @cached_property
    def dense(self) -> Tensor:
        """[E, L, H, T, D] model dtype, copied once."""
        layers = [
            pool[self.pages[:, layer]].flatten(2, 3)[:, :, : self.num_tokens]
            for layer, pool in enumerate(self.pools)
        ]
        return torch.stack(layers, dim=1)
