"""Measures how much the newest W queries attend to each cached key, and smooths it.

Source: AMS (arXiv 2605.23200) section 3.1 and its code
https://github.com/EIT-NLP/AdaptiveMassSegment/blob/7eb32cd75600c55888f223dddd2827a81d4f6a80/kvpress/presses/adaptive_segment_head_press.py.
Deviations: every query is at its own position (theirs rotates the whole window to the
current one); all sums are fp32 or fp64 (theirs rounds to the model dtype); the newest
entries get a value per (request, KV head) (theirs takes the maximum over every head of
every request); learned sinks, as gpt-oss has them
(https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py), take their share.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs_to_many
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.nucleus import row_nucleus_counts
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.softmax import effective_window, softmax, window_logits


def pooled_usage_ref(
    usage: Tensor,
    lengths: Tensor,
    window: Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> Tensor:
    """Smooth the usage of the older keys and give the newest ones a value.

    Args:
        usage: [E, L, H, T] floating point, mean probability of each key.
        lengths: [E, L, H] int64, tokens held.
        window: [E, L, H] int64, newest entries whose measured usage is not used.
        pool_kernel: odd; average over that many neighbours among the older keys, where
            neighbours outside count as zero. 1 does not pool.
        suffix_pad: what the newest entries hold, per (request, head): the "max" or
            "mean" of the pooled older ones, or 0 with "none".

    Returns:
        [E, L, H, T], same dtype as `usage`; zero on padding.
    """
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
    return torch.where(is_newest, value, older)


pooled_usage = Operation(pooled_usage_ref)


@dataclass(frozen=True)
class WindowUsage:
    """Attention of the window, per query head; zero on padding.

    Args:
        mean: [E, L, Hq, T] float32, mean over the window of each key's probability.
        last: [E, L, Hq, T] float32, probabilities of the newest query alone.
        lengths: [E, L, H] int64, tokens held.
        window: [E, L, H] int64, queries averaged, see `effective_window`.
        nucleus: [E, L, H, W] int64, tokens that hold the mass that was asked for, see
            `kernels.nucleus`; None unless asked for.
    """

    mean: Tensor
    last: Tensor
    lengths: Tensor
    window: Tensor
    nucleus: Tensor | None = None


def window_usage_ref(
    queries: Tensor,
    keys: PagedTokens,
    lengths: Tensor,
    scale: float,
    mass: float | None = None,
    sink_logits: Tensor | None = None,
) -> WindowUsage:
    """Causal softmax of the newest queries over the cached keys, reduced over them.

    Query w of W has index lengths - W + w and sees the keys up to its own index.

    Args:
        queries: [E, L, Hq, W, D] model dtype, post-RoPE, newest last. Rows of queries
            before a short request's first token are ignored.
        keys: [E, L, H, T, D] on pages, model dtype, post-RoPE, right-padded; padding is
            ignored whatever it holds.
        lengths: [E, L, H] int64, tokens held, 1..T.
        scale: softmax scale.
        mass: p of the nuclei, above 0, at most 1; None for no nuclei.
        sink_logits: [L, Hq] float32, of learned sinks: each is a logit in every softmax
            whose share no key gets; None for none. Not with `mass`.

    Returns:
        Usage per query head, in float32; sums over keys are carried in float64, so
        that padding does not change them.

    Raises:
        ValueError: shapes that do not fit together, or nuclei beside sinks.
    """
    check_window(queries, keys, mass, sink_logits)
    num_q_heads, window = queries.shape[2:4]
    num_heads, num_tokens = keys.shape[2:4]

    def of_chunk(*pairs: Tensor) -> tuple[Tensor, ...]:
        queries, keys, lengths, *sinks = pairs
        logits = window_logits(queries, keys, lengths, scale)
        counts = () if mass is None else (row_nucleus_counts(logits.amax(2), mass),)
        probs = softmax(logits, *(each.view(*logits.shape[:3], 1) for each in sinks))
        count = effective_window(lengths, window)[..., None, None]
        mean = (probs.sum(3) / count).flatten(1, 2)
        return mean, probs[:, :, :, -1].flatten(1, 2), *counts

    # float32 keys; logits and weights of all query heads; nuclei, four rows of int64.
    row_bytes = 8 * num_q_heads + (0 if mass is None else 32 * num_heads)
    pair_bytes = num_tokens * (4 * num_heads * keys.shape[-1] + window * row_bytes)
    rows = [queries, keys.dense, lengths]
    if sink_logits is not None:
        rows.append(sink_logits.expand(queries.shape[:3]))
    parts = map_pairs_to_many(of_chunk, pair_bytes, *rows)
    used = effective_window(lengths, window)
    return WindowUsage(parts[0], parts[1], lengths, used, *parts[2:])


window_usage = Operation(window_usage_ref)


def check_window(
    queries: Tensor, keys: PagedTokens, mass: float | None, sink_logits: Tensor | None
) -> None:
    """Raise ValueError for what `window_usage` does not take."""
    num_q_heads, window = queries.shape[2:4]
    if keys.shape[:2] != queries.shape[:2] or num_q_heads % keys.shape[2] or not window:
        raise ValueError(
            "queries: expected [E, L, H * G, W >= 1, D] for keys [E, L, H, T, D] = "
            f"{list(keys.shape)}, got {list(queries.shape)}"
        )
    if sink_logits is None:
        return
    if sink_logits.shape != queries.shape[1:3] or sink_logits.dtype != torch.float32:
        raise ValueError(
            f"sink_logits: expected [L, Hq] = {list(queries.shape[1:3])} float32, got "
            f"{list(sink_logits.shape)} {sink_logits.dtype}"
        )
    if mass is not None:
        raise ValueError("mass: expected None beside sinks, which nuclei do not count")


def measured(usage: WindowUsage | None) -> WindowUsage:
    """Return the usage that a policy declared it reads.

    Raises:
        ValueError: it was not measured.
    """
    if usage is None:
        raise ValueError("usage: expected the window's attention, got None")
    return usage


def mean_over_group(per_query_head: Tensor, num_kv_heads: int) -> Tensor:
    """Average the G query heads of each KV head.

    Args:
        per_query_head: [E, L, Hq, T]; query head h belongs to KV head h // G.
        num_kv_heads: H, divides Hq.

    Returns:
        [E, L, H, T].
    """
    return per_query_head.unflatten(2, (num_kv_heads, -1)).mean(3)
