"""How much attention the newest W queries pay to each cached key.

Called by policies at an event; the PyTorch reference of a later fused kernel.
Process: worker

Source: AMS (arXiv 2605.23200) section 3.1 and its code
https://github.com/EIT-NLP/AdaptiveMassSegment/blob/7eb32cd75600c55888f223dddd2827a81d4f6a80/kvpress/presses/adaptive_segment_head_press.py.
Deviations: every query is at its own position (theirs rotates the whole window to the
current one); all sums are fp32 or fp64 (theirs rounds to the model dtype); the newest
entries get a value per (request, KV head) (theirs takes the maximum over every head of
every request, available as "global").
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Bound on one chunk of attention probabilities; a chunk is some (event, layer) pairs.
CHUNK_BYTES = 256 * 2**20

SUFFIX_PADS = ("max", "mean", "none", "global")


@dataclass(frozen=True)
class WindowUsage:
    """Attention of the window, per query head; zero on padding.

    Args:
        mean: [E, L, Hq, T] float32, mean over the window of each key's probability.
        last: [E, L, Hq, T] float32, probabilities of the newest query alone.
        lengths: [E, L, H] int64, tokens held.
        window: [E, L, H] int64, queries averaged, see `effective_window`.
    """

    mean: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    window: torch.Tensor


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


def window_usage_ref(
    queries: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, scale: float
) -> WindowUsage:
    """Causal softmax of the newest queries over the cached keys, reduced over them.

    Query w of W stands at index lengths - W + w and sees the keys up to its own index.

    Args:
        queries: [E, L, Hq, W, D] model dtype, post-RoPE, newest last. Rows of queries
            before a short request's first token are ignored.
        keys: [E, L, H, T, D] model dtype, post-RoPE, right-padded; padding is ignored
            whatever it holds.
        lengths: [E, L, H] int64, tokens held, 1..T.
        scale: softmax scale.

    Returns:
        Usage per query head, in float32; sums over keys are carried in float64, so
        that padding does not change them.

    Raises:
        ValueError: shapes that do not fit together.
    """
    num_events, num_layers, num_q_heads, window, _ = queries.shape
    num_heads, num_tokens = keys.shape[2:4]
    if keys.shape[:2] != queries.shape[:2] or num_q_heads % num_heads or not window:
        raise ValueError(
            "queries: expected [E, L, H * G, W >= 1, D] for keys [E, L, H, T, D] = "
            f"{list(keys.shape)}, got {list(queries.shape)}"
        )
    used = effective_window(lengths, window)
    query_step = torch.arange(window, device=keys.device)
    # Per (event, layer) pair: the newest key a query sees, and whether it counts.
    newest = (lengths[..., None] - window + query_step).flatten(0, 1)  # [n, H, W]
    in_window = (query_step >= window - used[..., None]).flatten(0, 1)

    pairs = num_events * num_layers
    queries, keys = queries.flatten(0, 1), keys.flatten(0, 1)
    mean = keys.new_empty((pairs, num_q_heads, num_tokens), dtype=torch.float32)
    last = torch.empty_like(mean)
    step = max(1, CHUNK_BYTES // (4 * num_q_heads * window * num_tokens))
    for start in range(0, pairs, step):
        chunk = slice(start, start + step)
        probs = _window_probs(
            queries[chunk], keys[chunk], newest[chunk], in_window[chunk], scale
        )
        last[chunk] = probs[:, :, :, -1].flatten(1, 2)
        count = used.flatten(0, 1)[chunk, :, None, None]
        mean[chunk] = (probs.sum(3) / count).flatten(1, 2)
    shape = (num_events, num_layers, num_q_heads, num_tokens)
    return WindowUsage(mean.view(shape), last.view(shape), lengths, used)


def _window_probs(
    queries: torch.Tensor,
    keys: torch.Tensor,
    newest: torch.Tensor,
    in_window: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Probabilities [n, H, G, W, T] float32 of n (event, layer) pairs, 0 where unused.

    Args:
        queries: [n, Hq, W, D].
        keys: [n, H, T, D].
        newest: [n, H, W] int64, index of the newest key that a query sees.
        in_window: [n, H, W] bool.
        scale: softmax scale.
    """
    num, num_heads, num_tokens, size = keys.shape
    window = queries.shape[2]
    grouped = queries.float().reshape(num, num_heads, -1, size)
    logits = torch.matmul(grouped, keys.float().transpose(-1, -2)) * scale
    logits = logits.view(num, num_heads, -1, window, num_tokens)
    position = torch.arange(num_tokens, device=keys.device)
    hidden = position > newest[:, :, None, :, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    weight = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    # A row without a visible key is NaN here, and outside the window.
    return (weight / total.float()).masked_fill(~in_window[:, :, None, :, None], 0.0)


def mean_over_group(per_query_head: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Average the G query heads of each KV head.

    Args:
        per_query_head: [E, L, Hq, T]; query head h belongs to KV head h // G.
        num_kv_heads: H, divides Hq.

    Returns:
        [E, L, H, T].
    """
    return per_query_head.unflatten(2, (num_kv_heads, -1)).mean(3)


def pooled_usage(
    usage: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> torch.Tensor:
    """Smooth the usage of the older keys and give the newest ones a value.

    Args:
        usage: [E, L, H, T] floating point, mean probability of each key.
        lengths: [E, L, H] int64, tokens held.
        window: [E, L, H] int64, newest entries whose measured usage is not used.
        pool_kernel: odd; average over that many neighbours among the older keys, where
            neighbours outside count as zero. 1 does not pool.
        suffix_pad: what the newest entries hold, per (request, head): the "max" or
            "mean" of the pooled older ones, or 0 with "none". "global" is the maximum
            over all heads of all requests: it couples requests, so only comparisons
            with the authors' code should ask for it.

    Returns:
        [E, L, H, T], same dtype as `usage`; zero on padding.

    Raises:
        ValueError: unknown `suffix_pad`, or an even or non-positive `pool_kernel`.
    """
    if suffix_pad not in SUFFIX_PADS:
        raise ValueError(
            f"suffix_pad: expected one of {SUFFIX_PADS}, got {suffix_pad!r}"
        )
    if pool_kernel < 1 or pool_kernel % 2 == 0:
        raise ValueError(f"pool_kernel: expected an odd number >= 1, got {pool_kernel}")
    position = torch.arange(usage.shape[-1], device=usage.device)
    num_older = (lengths - window)[..., None]
    is_older = position < num_older  # [E, L, H, T]
    is_newest = ~is_older & (position < lengths[..., None])
    older = torch.where(is_older, usage, 0.0)
    if pool_kernel > 1:
        flat = older.flatten(0, 1)
        flat = F.avg_pool1d(flat, pool_kernel, stride=1, padding=pool_kernel // 2)
        older = torch.where(is_older, flat.view_as(older), 0.0)
    if suffix_pad == "none":
        return older
    if suffix_pad == "mean":
        total = older.sum(-1, keepdim=True, dtype=torch.float64)
        value = (total / num_older.clamp(min=1)).to(usage.dtype)
    else:
        value = older.amax(-1, keepdim=True)
    if suffix_pad == "global":
        value = value.amax()
    return torch.where(is_newest, value, older)
