"""The newest queries' attention to older tokens, and what all other tokens score."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.softmax import effective_window, window_logits
from vllm_kvpolicy.policies.base import EventInputs


def older_tokens(inputs: EventInputs, window_tokens: int) -> Tensor:
    """Return [E, L, H, T] bool: tokens before the newest `window_tokens`."""
    token = torch.arange(inputs.must_keep.shape[-1], device=inputs.lengths.device)
    lengths = inputs.lengths
    return token < (lengths - effective_window(lengths, window_tokens))[..., None]


def map_windows(
    of_logits: Callable[[Tensor, Tensor], Tensor],
    inputs: EventInputs,
    window_tokens: int,
    measured: Tensor,
) -> Tensor:
    """Measure what the newest queries attend to, a few (event, layer) pairs at a time.

    Args:
        of_logits: gets n pairs' `window_logits` [n, H, G, W, T] and [n, H, T] of
            `measured`; returns [n, ...].
        measured: [E, L, H, T] bool, tokens that share the attention.

    Returns:
        [E, L, ...].
    """
    keys = inputs.given("keys")
    queries = inputs.given("queries")[..., -window_tokens:, :]

    def of_pairs(
        queries: Tensor, keys: Tensor, lengths: Tensor, measured: Tensor
    ) -> Tensor:
        logits = window_logits(queries, keys, lengths, inputs.scale)
        return of_logits(logits, measured)

    pair_bytes = 3 * 4 * queries[0, 0, :, :, 0].numel() * keys.shape[3]
    return map_pairs(of_pairs, pair_bytes, queries, keys, inputs.lengths, measured)


def fill_with_highest(score: Tensor, measured: Tensor) -> Tensor:
    """Give unmeasured tokens the highest measured score of their row.

    Scores [..., T] float32 may hold anything where nothing was measured; they are zero
    in rows of which nothing was.
    """
    highest = score.masked_fill(~measured, -torch.inf).amax(-1, keepdim=True)
    highest = torch.where(measured.any(-1, keepdim=True), highest, 0.0)
    return torch.where(measured, score, highest)
