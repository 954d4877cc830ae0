"""The surrogate of KVzap: predicts how much a token will matter from its hidden state.

Source: KVzap (arXiv 2601.07891), and `presses/kvzap_press.py` of kvpress 0.5.5 for what
released weights mean. Deviations: none.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def surrogate_scores(
    hidden: torch.Tensor, linears: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Score tokens for every KV head of a layer.

    Args:
        hidden: [..., d] floating point, what the layer's attention is given, behind
            the input norm.
        linears: weight [out, in] and bias [out] of each linear layer, in the dtype of
            `hidden`, with an exact GELU between two of them; the last has H outputs.

    Returns:
        [..., H] float32, estimated logarithms of the KVzip+ scores.
    """
    for number, (weight, bias) in enumerate(linears):
        hidden = F.linear(F.gelu(hidden) if number else hidden, weight, bias)
    return hidden.float()
