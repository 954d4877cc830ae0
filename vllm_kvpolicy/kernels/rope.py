"""Rotary position embedding as scorers need it: rotate, undo, average over positions.

Source: RoFormer (arXiv 2104.09864) section 3.2, half layout: channel i turns with
channel i + D/2. Deviations: none.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """Frequencies of a model's rotary embedding.

    Args:
        inv_freq: [D/2] float64, radians per position and channel pair.
        scaling: factor on both rotated halves (YaRN's attention factor), else 1.
    """

    inv_freq: torch.Tensor
    scaling: float = 1.0

    @classmethod
    def from_theta(cls, theta: float, head_dim: int) -> "Rope":
        """Return unscaled RoPE of base `theta`."""
        half = torch.arange(head_dim // 2, dtype=torch.float64)
        return cls(theta ** (-half / (head_dim // 2)))

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [..., D/2] float64 radians of integer positions [...]."""
        return positions[..., None].double() * self.inv_freq

    def unrotate(self, rotated: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Undo the rotation, the scaling included.

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
