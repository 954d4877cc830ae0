"""Reads the decisions of DMS out of a model while it runs.

Forward hooks on the loaded model's modules write logits into `HeadLogits`. A borrowed
channel is set to 0 on its way to attention.

Source: Dynamic Memory Sparsification, arXiv 2506.05345, appendix B, and
https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7/experimental/dms. Deviations:
none in what is read.
"""

from typing import Any

import torch
from torch import nn

from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.policies.admissions.dms.model import DmsRule
from vllm_kvpolicy.policies.head_logits import HeadLogits


def attach_borrowed(
    attention: nn.Module,
    rule: DmsRule,
    logits: torch.Tensor,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    """Read a channel of the first query head of each group, and zero it.

    Args:
        attention: vLLM's attention module of a decoder layer: projections and, as
            `attn`, the attention layer.
        rule: which channel.
        logits: [step_tokens, H] float32, what is taken; scale and offset are not
            applied.
        num_heads: Hq, query heads.
        dtype: of the model.

    Raises:
        ValueError: not a module that is known.
    """
    if not hasattr(attention, "qkv_proj") or not hasattr(attention, "attn"):
        raise ValueError(
            f"{type(attention).__name__}: expected qkv_proj and attn, as in vLLM's "
            "Llama and Qwen3"
        )
    size, device = attention.head_dim, logits.device
    channel = rule.channel % size
    group = num_heads // logits.shape[1]
    # Without norms of its own, a query is what the projection gives.
    source = getattr(attention, "q_norm", None)
    is_normed = source is not None
    source = attention.qkv_proj if source is None else source
    visible = torch.ones(num_heads, size, device=device, dtype=dtype)
    visible[::group, channel] = 0  # sync-ok: a slice
    rest = torch.ones(2 * logits.shape[1] * size, device=device, dtype=dtype)
    before = visible if is_normed else torch.cat([visible.flatten(), rest])
    first = torch.arange(0, num_heads, group, device=device)
    taken = HeadLogits(logits, visible=before, channels=first * size + channel)
    source.add_module("kv_policy_logits", taken)
    source.register_forward_hook(_borrow)
    if rule.zero_after_rope:
        hidden = nn.Module()
        hidden.register_buffer("visible", visible.flatten().clone(), persistent=False)
        attention.attn.add_module("kv_policy_hidden", hidden)
        attention.attn.register_forward_pre_hook(_hide)


def _borrow(module: nn.Module, _args: Any, output: Any) -> Any:
    """Copy the borrowed channels of [T, Hq, D] or of [T, (Hq + 2H) * D]."""
    values = output[0] if isinstance(output, tuple) else output
    taken = module.kv_policy_logits
    taken(values.flatten(1)[:, taken.channels])
    hidden = values * taken.visible
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _hide(layer: nn.Module, args: tuple) -> tuple:
    """Set borrowed channels of rotated queries [T, Hq * D] to 0; a pre-hook."""
    query, *others = args
    visible = layer.kv_policy_hidden.visible
    return ((query.flatten(1) * visible).view(query.shape), *others)


def attach_adapter(
    layer: nn.Module, logits: torch.Tensor, weights: DecisionWeights, epsilon: float
) -> None:
    """Compute logits from the residual stream before a decoder layer.

    Args:
        layer: vLLM's decoder layer, called with positions, hidden states and residual.
        logits: [step_tokens, H] float32, written; scale and offset are not applied.
        weights: of this layer, in the model's dtype.
        epsilon: the model's `rms_norm_eps`.
    """
    tensors = {"norm": weights.norm, "projection": weights.projection}
    taken = HeadLogits(logits, **tensors)
    taken.epsilon = epsilon
    layer.add_module("kv_policy_logits", taken)
    layer.register_forward_pre_hook(_adapt, with_kwargs=True)


def _adapt(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Store an adapter's logits for [T, d]; a pre-hook."""
    given = dict(zip(("positions", "hidden_states", "residual"), args, strict=False))
    given |= kwargs
    hidden, residual = given["hidden_states"], given["residual"]
    stream = hidden if residual is None else hidden + residual
    taken = layer.kv_policy_logits
    weights = DecisionWeights(taken.norm, taken.projection)
    taken(decision_logits(stream, weights, taken.epsilon, 1.0, 0.0))
