"""Refuses what a policy is not tested with: kinds of a model's attention layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.refusal import FITTED, Refusal, is_fitted, is_float8, is_ragged
from vllm_kvpolicy.policies.catalogue.selections import SELECTIONS
from vllm_kvpolicy.sizes import sliding_groups


def _layer_kinds(config: Any) -> set[str]:
    """Return the attention kinds that the model names for its layers."""
    return set(getattr(config.model_config.hf_text_config, "layer_types", None) or ())


def _beside(applies: Callable[[Any], object], config: Any) -> bool:
    """Return whether the model mixes full attention with windows, and `applies`."""
    mixed = {"full_attention", "sliding_attention"}
    return mixed <= _layer_kinds(config) and bool(applies(config))


BESIDE_SLIDING = (
    Refusal(
        "sliding-window layers without the hybrid KV cache manager",
        partial(
            _beside,
            lambda config: config.scheduler_config.disable_hybrid_kv_cache_manager,
        ),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "full attention in several KV cache groups",
        partial(_beside, lambda config: sliding_groups(config).num_full_groups > 1),
        "serve a model with fewer layers of full attention than with sliding windows, "
        "or with less than half as many more",
    ),
    Refusal(
        "per-head lengths with sliding-window layers",
        partial(_beside, is_ragged),
        "choose a policy whose heads keep equal numbers of tokens, without "
        + ", ".join(f"`{name}`" for name in SELECTIONS),
    ),
    Refusal(
        f"sliding-window layers with a policy for the model's own weights ({FITTED})",
        partial(_beside, is_fitted),
        "choose another policy: no file was made or tested for such a model",
    ),
    Refusal(
        "FP8 KV caches with sliding-window layers",
        partial(_beside, is_float8),
        "leave out --kv-cache-dtype",
    ),
    Refusal(
        "speculative decoding with sliding-window layers",
        partial(_beside, lambda config: config.speculative_config is not None),
        "leave out --speculative-config",
    ),
    Refusal(
        "sliding-window layers on GPUs",
        partial(_beside, lambda _: compat.platform_name() != "cpu"),
        "serve a model whose layers all attend to the whole context: no GPU has run a "
        "policy beside windows",
    ),
)

LAYER_REFUSALS = (
    Refusal(
        "sliding windows in every layer",
        lambda config: (
            config.cache_config.sliding_window is not None
            or _layer_kinds(config) == {"sliding_attention"}
        ),
        "serve a model of which some layers attend to the whole context",
    ),
    *BESIDE_SLIDING,
    Refusal(
        "layers other than full attention and sliding windows",
        lambda config: bool(
            _layer_kinds(config) - {"full_attention", "sliding_attention"}
        ),
        "serve a model whose layers all attend to the whole context",
    ),
    Refusal(
        "mamba and linear-attention hybrids",
        lambda config: config.model_config.is_hybrid,
        "serve a pure attention model",
    ),
    Refusal(
        "attention-free models",
        lambda config: config.model_config.is_attention_free,
        "leave out --kv-policy: there is no KV cache",
    ),
    Refusal(
        "multi-head latent attention (MLA)",
        lambda config: config.model_config.use_mla,
        "serve a model with grouped-query or multi-head attention",
    ),
    Refusal(
        "hierarchical sparse attention (HiSparse)",
        lambda config: config.attention_config.hisparse_config is not None,
        "remove its --attention-config entry",
    ),
    Refusal(
        "non-causal attention",
        lambda config: config.attention_config.use_non_causal,
        "remove its --attention-config entry",
    ),
    Refusal(
        "KV sharing between layers",
        lambda config: bool(
            getattr(config.model_config.hf_text_config, "num_kv_shared_layers", 0)
            or config.cache_config.kv_sharing_fast_prefill
        ),
        "serve a model in which every layer has its own keys and values, without "
        "--kv-sharing-fast-prefill",
    ),
)
