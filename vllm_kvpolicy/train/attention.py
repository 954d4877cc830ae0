"""Attention of a transformers model in which a student sees older keys less.

Source: the biases of WG-KV (arXiv 2512.17452) section 3.4 and DMS (arXiv 2506.05345)
section 3. Deviations: an explicit bias on blocks of queries.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from vllm_kvpolicy.kernels.visibility import visible, visible_until

NAME = "kvpolicy_student"  # of the attention function, in transformers
BLOCK = 512  # queries whose attention weights are in memory at once


class Student(ABC):
    """One forward pass in which queries see less than in the teacher's."""

    def enter(self, layer: int, hidden: torch.Tensor) -> None:
        """Receive the residual stream [B, T, d] before a layer's input norm."""
        return None

    @abstractmethod
    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a layer's queries and what `bias` needs to know about its keys.

        Args:
            layer: its index.
            query: [B, Hq, T, D], after RoPE.
            key: [B, H, T, D], after RoPE.

        Returns:
            The queries, possibly changed, and one number per key, [B, H, T]; None if
            queries see all keys.
        """

    @abstractmethod
    def bias(self, known: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the bias that is added to the attention logits of some queries.

        Args:
            known: [..., T], from `prepare`; may end after the last of the queries.
            queries: [Q] integers, positions.

        Returns:
            [..., Q, T] float32.
        """


def weighed(
    log_weights: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return a bias: each key's log weight outside the window, 0 inside and for sinks.

    Args:
        log_weights: [..., T] float32.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        queries: [Q] integers, positions.

    Returns:
        [..., Q, T] float32, minus infinity for keys after their query.
    """
    shape, device = log_weights.shape[-1:], log_weights.device
    none = torch.zeros(shape, dtype=torch.bool, device=device)
    always = visible(visible_until(none, window, sinks=sinks), queries)
    causal = visible(visible_until(~none, window), queries)
    bias = log_weights[..., None, :].masked_fill(always, 0.0)
    return bias.masked_fill(~causal, -torch.inf)


def hidden(
    keep: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return a bias that hides keys outside the window unless `keep` [..., T]."""
    seen = visible(visible_until(keep, window, sinks=sinks), queries)
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -torch.inf)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    student: Student | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally over whole, unpadded sequences, with a student's bias if given.

    Args:
        module: the layer's attention module.
        query: [B, Hq, T, D], after RoPE.
        key: [B, H, T, D], after RoPE.
        value: [B, H, T, D].
        attention_mask: None.
        scaling: factor on the logits.
        student: the keyword argument of that name of the model's forward.

    Returns:
        [B, T, Hq, D], and None for the weights.
    """
    known = None
    if student is not None:
        query, known = student.prepare(module.layer_idx, query, key)
    if student is None or known is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    num_tokens = query.shape[-2]
    if num_tokens <= BLOCK:
        out = _attend(query, key, value, known, student, scaling, 0)
        return out.transpose(1, 2), None
    parts = []
    for start in range(0, num_tokens, BLOCK):
        stop = min(start + BLOCK, num_tokens)
        seen = (t[:, :, :stop] for t in (key, value, known))
        rows = query[:, :, start:stop]
        # The backward pass recomputes attention weights instead of keeping them.
        parts.append(
            checkpoint(
                _attend, rows, *seen, student, scaling, start, use_reentrant=False
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    known: torch.Tensor,
    student: Student,
    scaling: float,
    start: int,
) -> torch.Tensor:
    """Attend from the queries at positions start, start + 1... to the given keys."""
    positions = torch.arange(start, start + query.shape[-2], device=query.device)
    bias = student.bias(known, positions).to(query.dtype)
    bias = bias.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(NAME, attention)
