"""What tokens score that a scorer does not measure."""

import torch


def fill_with_highest(score: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """Give unmeasured tokens the highest measured score of their row.

    Args:
        score: [..., T] float32; may hold anything where nothing was measured.
        measured: [..., T] bool.

    Returns:
        [..., T] float32; zero where nothing was measured in a row.
    """
    highest = score.masked_fill(~measured, -torch.inf).amax(-1, keepdim=True)
    highest = torch.where(measured.any(-1, keepdim=True), highest, 0.0)
    return torch.where(measured, score, highest)
