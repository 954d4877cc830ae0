"""Softmax over some of a row's tokens.

Called by scorers that leave tokens out of what they measure.
Process: worker
"""

import torch


def masked_softmax(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Share one unit among the tokens of each row that `mask` admits.

    Args:
        logits: [..., T] float32; may hold anything outside the mask.
        mask: bool, broadcastable to [..., T].

    Returns:
        [..., T] float32, zero outside the mask. The sum is carried in float64, so that
        padding does not change it.
    """
    shown = logits.masked_fill(~mask, -torch.inf)
    weight = torch.exp(shown - shown.amax(-1, keepdim=True))
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    # A row without any token is NaN here.
    return (weight / total.float()).masked_fill(~mask, 0.0)
