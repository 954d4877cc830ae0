"""Attention of a transformers model whose older keys weigh as much as their gates say.

Called by train.wgkv_base, as the model's attention function.
Process: any

Source: WG-KV (arXiv 2512.17452) section 3.4. Deviations: gates are evaluated in
float32, on keys whose rotation is undone, as they are when a model is served.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from vllm_kvpolicy.admission.visibility import visible, visible_until
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate
from vllm_kvpolicy.policies.rope import Rope

NAME = "kvpolicy_wgkv"  # of the attention function, in transformers
LEAST = 1e-3  # smallest gate in a logarithm; none has a gradient below
BLOCK = 512  # queries whose weights are in memory at a time


@dataclass
class Gating:
    """How one pass through a model is gated, and the gates that it came to.

    Args:
        weights: gates of all layers.
        rope: how the model rotates.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        threshold: None to weigh keys by their gates; a number to hide those whose
            gate is not above it, as a server does.
        values: gates by layer, [B, H, T] float32, written in the pass.
    """

    weights: GateWeights
    rope: Rope
    window: int
    sinks: int = 0
    threshold: float | None = None
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def evaluate(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return and note the gates [B, H, T] of cached keys [B, H, T, D]."""
        positions = torch.arange(keys.shape[-2], device=keys.device)
        before = self.rope.unrotate(keys, positions)
        self.values[layer] = gate(before, keys, self.weights.layer(layer))
        return self.values[layer]

    def bias(self, gates: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits of some queries.

        Args:
            gates: [..., T] float32.
            queries: [Q] integers, positions.

        Returns:
            [..., Q, T] float32.
        """
        if self.threshold is None:
            return log_bias(gates, self.window, self.sinks, queries)
        keep = gates > self.threshold
        until = visible_until(keep, self.window, sinks=self.sinks)
        seen = visible(until, queries)
        return torch.zeros_like(seen, dtype=gates.dtype).masked_fill_(~seen, -torch.inf)


def log_bias(
    gates: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return log max(g, 0.001) outside the window, 0 within and for sinks.

    Args:
        gates: [..., T] float32, g.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        queries: [Q] integers, positions.

    Returns:
        [..., Q, T] float32, minus infinity for keys behind their query.
    """
    none = torch.zeros(gates.shape[-1], dtype=torch.bool, device=gates.device)
    always = visible(visible_until(none, window, sinks=sinks), queries)
    causal = visible(visible_until(~none, window), queries)
    bias = gates.clamp(min=LEAST).log()[..., None, :].masked_fill(always, 0.0)
    return bias.masked_fill(~causal, -torch.inf)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    gating: Gating | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally over whole, unpadded sequences, gated if `gating` is given.

    Args:
        module: the layer's attention module.
        query: [B, Hq, T, D], after RoPE.
        key: [B, H, T, D], after RoPE.
        value: [B, H, T, D].
        attention_mask: None.
        scaling: factor on the logits.
        gating: passed to the model's forward by that name.

    Returns:
        [B, T, Hq, D], and None for the weights.
    """
    if gating is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    gates = gating.evaluate(module.layer_idx, key)
    num_tokens = query.shape[-2]
    if num_tokens <= BLOCK:
        out = _attend(query, key, value, gates, gating, scaling, 0)
        return out.transpose(1, 2), None
    parts = []
    for start in range(0, num_tokens, BLOCK):
        stop = min(start + BLOCK, num_tokens)
        seen = (t[:, :, :stop] for t in (key, value, gates))
        rows = query[:, :, start:stop]
        # Weights are computed again in the backward pass rather than kept.
        parts.append(
            checkpoint(
                _attend, rows, *seen, gating, scaling, start, use_reentrant=False
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: torch.Tensor,
    gating: Gating,
    scaling: float,
    start: int,
) -> torch.Tensor:
    """Attend from the queries at start, start + 1... to all the keys given."""
    positions = torch.arange(start, start + query.shape[-2], device=query.device)
    bias = gating.bias(gates, positions).to(query.dtype)
    bias = bias.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(NAME, attention)
