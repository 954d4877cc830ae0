"""Handles tokens that a scorer does not measure: which they are, what they score."""

import torch


def leading_run(must_keep: torch.Tensor) -> torch.Tensor:
    """Mark the sinks, or the protected prompt: the True entries before any False one.

    Args:
        must_keep: [..., T] bool.

    Returns:
        [..., T] bool.
    """
    return must_keep.long().cumprod(-1).bool()


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
