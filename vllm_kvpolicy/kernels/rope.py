"""Rotary position embedding as scorers need it: rotate, undo, average over positions.

Source: RoFormer (arXiv 2104.09864) section 3.2, half layout: channel i turns with
channel i + D/2, unless an order of channels says otherwise. Deviations: none.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """How a model rotates queries and keys: all layers alike, or K kinds of layers.

    Args:
        inv_freq: [D/2] float64, radians per position and channel pair; of kinds
            [K, D/2], 0 of a pair that is not rotated.
        scaling: factor on rotated pairs (YaRN's attention factor), else 1; of kinds
            [K, D/2] float64.
        of_layer: [L] int64, the kind of each layer; None where all are alike.
        order: [K, D] int64, the channels such that those at f and f + D/2 are pair f;
            None for the half layout, where they are in order.
    """

    inv_freq: Tensor
    scaling: float | Tensor = 1.0
    of_layer: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def from_theta(cls, theta: float, head_dim: int) -> "Rope":
        """Return unscaled RoPE of base `theta`."""
        half = torch.arange(head_dim // 2, dtype=torch.float64)
        return cls(theta ** (-half / (head_dim // 2)))

    @cached_property
    def partners(self) -> Tensor | None:
        """[K, D] int64, the other channel of each pair; None for the half layout."""
        if self.order is None:
            return None
        return self.by_channel(*self.order.chunk(2, dim=-1)[::-1])

    def by_channel(self, first: Tensor, second: Tensor) -> Tensor:
        """Return [K, ..., D] of what belongs to the channels of pairs.

        Args:
            first: [K, ..., D/2], of the first channel of each pair.
            second: of the second channels.
        """
        halves = torch.cat([first, second], -1)
        if self.order is None:
            return halves
        between = (1,) * (halves.dim() - 2)
        places = self.order.argsort(-1).view(len(halves), *between, -1)
        return halves.gather(-1, places.expand(halves.shape))

    def by_layer(self, of_kinds: Tensor) -> Tensor:
        """Return [..., L, D/2], L = 1 where all layers are alike.

        Args:
            of_kinds: [..., K, D/2] or [..., D/2], as the frequencies are.
        """
        if self.of_layer is None:
            return of_kinds[..., None, :]
        return of_kinds[..., self.of_layer, :]

    def angles(self, positions: Tensor) -> Tensor:
        """Return float64 radians of integer positions [...].

        They are [..., D/2], of kinds [..., K, D/2].
        """
        return positions[(..., *(None,) * self.inv_freq.dim())].double() * self.inv_freq

    def unrotate(self, rotated: Tensor, positions: Tensor) -> Tensor:
        """Undo a rotation that is alike in all layers, the scaling included.

        Args:
            rotated: [..., D] floating point, post-RoPE.
            positions: integers, broadcastable to [...].

        Returns:
            [..., D] float32.
        """
        angle = self.angles(positions)
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = rotated.float().chunk(2, dim=-1)
        turned = torch.cat([first * cos + second * sin, second * cos - first * sin], -1)
        return turned / self.scaling
