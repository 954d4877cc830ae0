"""The random rows, and the odd text, that trainers read in tests."""

import torch

from training.rows import Row

TOKENS = 64
TEXT = "".join(chr(32 + 7 * i * i % 95) for i in range(600))


def ids(count: int, seed: int = 0) -> torch.Tensor:
    """Return random tokens of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 99, (count,), generator=generator)


def rows(count: int, seed: int = 0) -> list[Row]:
    """Return rows of TOKENS random tokens each."""
    return [Row(each) for each in ids(count * TOKENS, seed).view(count, TOKENS)]
