"""Layers whose heads share a latent vector per token (MLA), as events see them.

Such a layer caches one vector for each token: a normed latent, from which each head has
keys and values of its own, and a rotated key that all heads share. A query turned into
the space of latents gives the same logits with that vector as it gives with its head's
key, so that scorers of logits see one KV head and all query heads.

Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, whose appendix C turns queries;
vLLM does so for tokens that it generates. Deviations: none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention


def is_latent(layer: Any) -> bool:
    """Return whether the heads of one of vLLM's attention layers share vectors."""
    return isinstance(layer, MLAAttention)


def watch(layer: Any, observe: Callable[..., None]) -> None:
    """Show a layer's new tokens, in each step, to `observe`; see `Capture.observe`.

    Such layers hand generated tokens and prompts to different methods of their
    backend. So the method before that is wrapped, of this one instance.
    """
    attend = partial(type(layer).forward_impl, layer)

    def forward_impl(
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        observe(layer.kv_policy_index, q, k_c_normed, k_pe)
        return attend(q, k_c_normed, k_pe, *rest, **more)

    layer.forward_impl = forward_impl


def in_latent_space(layers: Sequence[Any], queries: torch.Tensor) -> torch.Tensor:
    """Turn queries into the space of latent vectors.

    Args:
        queries: [L, M, Hq * (P + R) or more] model dtype, post-RoPE, one after the
            other of each head; P channels for its own keys, R for the shared one.

    Returns:
        [L, M, Hq, D] model dtype, D channels as a cached vector has.
    """
    first = layers[0]
    heads, parts = first.num_heads, (first.qk_nope_head_dim, first.qk_rope_head_dim)
    own = queries[..., : heads * sum(parts)].unflatten(-1, (heads, -1))
    plain, rotated = own.split(parts, dim=-1)
    turned = [
        torch.bmm(each.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        for each, layer in zip(plain, layers, strict=True)
    ]
    return torch.cat([torch.stack(turned), rotated], dim=-1)


def write_latents(layer: Any, vectors: torch.Tensor, slots: torch.Tensor) -> None:
    """Write vectors [T, 1, D] into the cache as the layer's own backend does."""
    latent, rotated = vectors.split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
    kinds = layer.kv_cache_dtype, layer._k_scale
    write = layer.impl.do_kv_cache_update
    write(latent[:, 0], rotated, layer.kv_cache, slots, *kinds)
