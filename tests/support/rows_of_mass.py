"""Rows of attention mass that segmentation finds hard."""

import torch

from vllm_kvpolicy.kernels.segment_quota import to_fixed_point


def rows_of_mass(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Six rows: flat, uneven, on few tokens, on the first, on the last, sparse."""
    mass = torch.rand(6, tokens, generator=generator, dtype=torch.float64)
    mass **= torch.tensor([[0], [3], [40], [1], [1], [1]])
    mass[3, 1:] *= 1e-4
    lengths = torch.randint(1, tokens + 1, (6,), generator=generator)
    lengths[1] = tokens
    position = torch.arange(tokens)
    mass[4] *= torch.where(position == lengths[4] - 1, 1, 1e-3)
    mass[5] *= torch.rand(tokens, generator=generator) < 0.1
    valid = position < lengths[:, None]
    mass = (mass + 1e-12).masked_fill(~valid, 0)
    exempt = torch.rand(6, tokens, generator=generator) < 0.25
    exempt[2] = False
    exempt[5] |= True
    room = (valid & ~exempt).sum(-1)
    share = torch.tensor([0.5, 1.0, 0.1, 0.0, 0.9, 0.5], dtype=torch.float64)
    return {
        "mass": to_fixed_point(mass / mass.sum(-1, keepdim=True)),
        "lengths": lengths,
        "exempt": exempt,
        "total": (share * room).long(),
    }
