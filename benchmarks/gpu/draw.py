"""Owns the sizes of an event, and random tensors that are the same on any device."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """One event batch: E, L, H, G, T, D, W, K and N of `policies.base`.

    Args:
        dtype: of keys, values and queries.
        pool_pages: pages of the pool, at least; 0 for as many as are held.
    """

    events: int = 2
    layers: int = 32
    heads: int = 8
    group: int = 4
    tokens: int = 1536
    dim: int = 128
    window: int = 32
    budget: int = 1024
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    pool_pages: int = 0

    @property
    def rows(self) -> int:
        """R, rows of (event, layer, KV head)."""
        return self.events * self.layers * self.heads

    @property
    def row_pages(self) -> int:
        """C, pages of each row."""
        return -(-self.tokens // self.page)

    def plain(self) -> dict[str, Any]:
        """Return it for a record."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


CPU = torch.device("cpu")


class Draw:
    """Random tensors on a device: those of a source, whatever the device.

    Args:
        source: where they are drawn; a GPU is much faster than the host, and draws
            other numbers. It must be the default device while tensors are made.
    """

    def __init__(
        self, seed: int, device: torch.device, source: torch.device = CPU
    ) -> None:
        self.generator = torch.Generator(source).manual_seed(seed)
        self.device, self.source = device, source

    def normal(self, *shape: int) -> torch.Tensor:
        """Return standard normal float32."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Return uniform float32 in [0, 1)."""
        return torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 from `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self.generator)

    def order(self, count: int) -> torch.Tensor:
        """Return a permutation, int64."""
        return torch.randperm(count, generator=self.generator)

    def lengths(self, size: Size, least: int) -> torch.Tensor:
        """Return tokens held per row [R]; the first row is full, the last short."""
        lengths = self.integers(
            max(least, size.tokens // 2), size.tokens + 1, size.rows
        )
        lengths[0] = size.tokens
        lengths[-1] = least
        return lengths

    def here(self, arguments: Arguments) -> Arguments:
        """Return the arguments with their tensors on the device."""
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
