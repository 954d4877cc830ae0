"""Measures what a token shows while it is computed.

That is how far its hidden state moves, and how much the channels of its key or value
differ.
"""

import torch


def hidden_change(hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Measure the step between two hidden states, ||hidden - before||_2.

    Args:
        hidden: [..., d] model dtype, outputs of a decoder layer.
        before: [..., d] model dtype, the same layer's outputs at the tokens before.

    Returns:
        [...] float32; the difference is rounded to the model dtype, the norm is not.
    """
    return torch.linalg.vector_norm(hidden - before, dim=-1, dtype=torch.float32)


def channel_variance(vectors: torch.Tensor) -> torch.Tensor:
    """Compute the unbiased variance over channels, averaged over KV heads.

    Args:
        vectors: [T, H, D] floating point, keys or values as they are cached.

    Returns:
        [T] float32.
    """
    return vectors.float().var(-1).mean(-1)
