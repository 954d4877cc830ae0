"""Logits of the newest W queries over the cached keys that they see.

Source: causal attention of the captured queries, each at its own position (AMS,
arXiv 2605.23200, section 3.1, rotates the whole window to the current one).
"""

import torch

from vllm_kvpolicy.kernels.softmax import clean_


def effective_window(lengths: torch.Tensor, window_tokens: int) -> torch.Tensor:
    """Shorten the window of requests that hold no more than `window_tokens` tokens.

    At least one key stays older than the window, and at least one query stays in it.

    Args:
        lengths: [E, L, H] int64, tokens held.
        window_tokens: W, queries captured.

    Returns:
        [E, L, H] int64, between 1 and W.
    """
    return (lengths - 1).clamp(1, max(window_tokens, 1))


def window_logits(
    queries: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dot products of n (event, layer) pairs; query w has index lengths - W + w.

    Args:
        queries: [n, Hq, W, D] model dtype, post-RoPE, newest last.
        keys: [n, H, T, D] model dtype, post-RoPE; padding may hold anything.
        lengths: [n, H] int64, tokens held, 1..T.
        scale: softmax scale.

    Returns:
        [n, H, G, W, T] float32; minus infinity where a query does not see a key, in the
        rows of queries outside the window of a short request, and in place of NaN; the
        largest number in place of infinity.
    """
    num_heads, num_tokens = keys.shape[1:3]
    window = queries.shape[2]
    rows = queries.float().unflatten(1, (num_heads, -1)).flatten(2, 3)
    logits = torch.matmul(rows, keys.float().transpose(-1, -2)).mul_(scale)
    step = torch.arange(window, device=keys.device)
    length = lengths[..., None]
    in_window = step >= window - effective_window(length, window)
    seen = torch.where(in_window, length - window + step, -1)  # [n, H, W], newest key
    token = torch.arange(num_tokens, device=keys.device)
    # Added, not filled in: several times as fast on a CPU.
    bias = torch.where(token > seen[..., None], -torch.inf, 0.0)[:, :, None]
    return clean_(logits.unflatten(2, (-1, window)).add_(bias))
