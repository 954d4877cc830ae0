"""Measures the attention that the newest W queries pay to each cached key.

Source: AMS (arXiv 2605.23200) section 3.1 and its code
https://github.com/EIT-NLP/AdaptiveMassSegment/blob/7eb32cd75600c55888f223dddd2827a81d4f6a80/kvpress/presses/adaptive_segment_head_press.py.
Deviations: every query is at its own position (theirs rotates the whole window to the
current one); all sums are fp32 or fp64 (theirs rounds to the model dtype); the newest
entries get a value per (request, KV head) (theirs takes the maximum over every head of
every request, available as "global"); learned sinks, as gpt-oss has them
(https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py), take their share.
"""

from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.chunks import map_pairs_to_many
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.nucleus import row_nucleus_counts
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.softmax import effective_window, softmax, window_logits


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

    mean: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    window: torch.Tensor
    nucleus: torch.Tensor | None = None


def window_usage_ref(
    queries: torch.Tensor,
    keys: PagedTokens,
    lengths: torch.Tensor,
    scale: float,
    mass: float | None = None,
    sink_logits: torch.Tensor | None = None,
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
    check_shapes(queries, keys)
    check_sinks(queries, sink_logits, mass)
    num_q_heads, window = queries.shape[2:4]
    num_heads, num_tokens = keys.shape[2:4]

    def of_chunk(
        queries: torch.Tensor,
        keys: torch.Tensor,
        lengths: torch.Tensor,
        *sink_logits: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        logits = window_logits(queries, keys, lengths, scale)
        counts = () if mass is None else (row_nucleus_counts(logits.amax(2), mass),)
        probs = softmax(
            logits, *(of_row.view(*logits.shape[:3], 1) for of_row in sink_logits)
        )
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


def check_shapes(queries: torch.Tensor, keys: PagedTokens) -> None:
    """Raise ValueError if queries and keys of `window_usage` do not fit together."""
    num_q_heads, window = queries.shape[2:4]
    if keys.shape[:2] != queries.shape[:2] or num_q_heads % keys.shape[2] or not window:
        raise ValueError(
            "queries: expected [E, L, H * G, W >= 1, D] for keys [E, L, H, T, D] = "
            f"{list(keys.shape)}, got {list(queries.shape)}"
        )


def check_sinks(
    queries: torch.Tensor, sink_logits: torch.Tensor | None, mass: float | None
) -> None:
    """Raise ValueError if `window_usage` does not take these sinks."""
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


def mean_over_group(per_query_head: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Average the G query heads of each KV head.

    Args:
        per_query_head: [E, L, Hq, T]; query head h belongs to KV head h // G.
        num_kv_heads: H, divides Hq.

    Returns:
        [E, L, H, T].
    """
    return per_query_head.unflatten(2, (num_kv_heads, -1)).mean(3)
