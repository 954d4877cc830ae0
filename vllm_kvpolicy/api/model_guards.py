"""Refuses what a policy is not tested with: kinds of models, rows of `guards`.

About a model's attention layers, how it rotates queries and keys, and its learned
sinks: logits that take part in every softmax, see `worker.layers`.
"""

from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.refusal import (
    FITTED,
    Refusal,
    both,
    has_adapters,
    has_word_with,
    is_fitted,
    is_float8,
    is_on_gpu,
    is_ragged,
    listed,
    speculates,
    transfers_weights,
)
from vllm_kvpolicy.policies.names import SELECTIONS
from vllm_kvpolicy.sizes import layer_kinds, sliding_groups

FULL, SLIDING = "full_attention", "sliding_attention"
ROTATING, reads_rotations = listed("rotates"), has_word_with("rotates")
# Model types whose code in Transformers decides by itself which layers rotate; vLLM's
# own code of these models says it in attributes, see worker.layers.
DECIDING = {
    "cohere2",
    "cohere_compass",
    "exaone4",
    "exaone4_5",
    "exaone_moe",
    "granite_swa",
    "granitemoe_swa",
    "muse_glimmer",
}


def _mixes_windows(config: Any) -> bool:
    """Return whether the model mixes full attention with sliding windows."""
    return {FULL, SLIDING} <= set(layer_kinds(config))


def _varying(config: Any) -> set[str]:
    """Return the fields that differ from layer to layer (Transformers' own word)."""
    text = config.model_config.hf_text_config
    return set(getattr(text, "per_layer_attributes", None) or ())


def _text(config: Any, name: str) -> Any:
    """Return what the model's own configuration says for all layers, or None."""
    if name in _varying(config):  # must not be read
        return None
    return getattr(config.model_config.hf_text_config, name, None)


def _is_one_of(names: tuple[str, ...], config: Any) -> bool:
    return not set(names).isdisjoint(config.model_config.architectures or ())


def _attends_by_itself(config: Any) -> bool:
    """Return whether layers are of classes, or have backends, of the model's own."""
    if _is_one_of(compat.OWN_ATTENTION, config) or _text(config, "param_sink_number"):
        return True
    if not str(_text(config, "model_type")).startswith("mimo_v2"):
        return False
    values = _text(config, "v_head_dim"), _text(config, "swa_v_head_dim")
    return any(value not in (None, _text(config, "head_dim")) for value in values)


def _differs(config: Any) -> bool:
    """Return whether layers differ in heads or head sizes, by fields of any kind."""
    if {"head_dim", "num_key_value_heads", "num_attention_heads"} & _varying(config):
        return True
    other = _text(config, "attention_other_setting") or {}
    found = (
        (_text(config, "swa_head_dim"), "head_dim"),
        (other.get("head_dim"), "head_dim"),
        (_text(config, "swa_num_key_value_heads"), "num_key_value_heads"),
        (other.get("num_attention_groups"), "num_attention_groups"),
    )
    if any(value not in (None, _text(config, name)) for value, name in found):
        return True
    per_layer = _text(config, "num_attention_heads_per_layer") or ()
    blocks = _text(config, "block_configs") or ()
    groups = {
        _field(_field(block, "attention"), "n_heads_in_group") for block in blocks
    }
    heads = {
        count
        for count, kind in zip(per_layer, layer_kinds(config), strict=False)
        if kind == FULL
    }
    own = _text(config, "num_attention_heads")
    return not heads <= {own} or len(groups - {None}) > 1


def _field(entry: Any, name: str) -> Any:
    """Return a field of a nested configuration, which may be an object or a dict."""
    return entry.get(name) if isinstance(entry, dict) else getattr(entry, name, None)


def _has_other_windows(config: Any) -> bool:
    """Return whether windows are not of the size that the configuration names."""
    return (
        _text(config, "interleaved_sliding_window") is not None
        or _num_sizes(_text(config, "sliding_windows")) > 1
        or (
            SLIDING in layer_kinds(config)
            and _text(config, "model_type") in compat.WIDER_WINDOWS
        )
    )


def _num_sizes(windows: Any) -> int:
    """Return how many sizes a list of windows has; one size may stand for it."""
    return len(set(windows) - {None}) if isinstance(windows, list | tuple) else 1


def _has_unknown_sinks(config: Any) -> bool:
    """Return whether a Granite has learned sinks; see vLLM's granite.py."""
    given = _text(config, "attention_sinks")
    has_sinks = bool(layer_kinds(config)) if given is None else given
    return has_sinks and _text(config, "model_type") in compat.UNTESTED_SINKS


def _parameters(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of rotations, those of kinds of layers one by one."""
    found = getattr(config.model_config.hf_text_config, "rope_parameters", None) or {}
    return [found, *(each for each in found.values() if isinstance(each, dict))]


def _code_decides(config: Any) -> bool:
    """Return whether only a model's code in Transformers tells how it rotates."""
    model = config.model_config
    kinds = {each.get("rope_type") for each in _parameters(config)}
    differs = (
        kinds & {"dynamic", "longrope"}
        or getattr(model.hf_text_config, "model_type", None) in DECIDING
    )
    return bool(differs) and model.using_transformers_backend()


MODEL_REFUSALS = (
    # Attention layers.
    Refusal(
        "sliding windows in every layer",
        lambda config: (
            config.cache_config.sliding_window is not None
            or set(layer_kinds(config)) == {SLIDING}
        ),
        "serve a model of which some layers attend to the whole context",
    ),
    Refusal(
        "sliding-window layers without the hybrid KV cache manager",
        both(
            _mixes_windows,
            lambda config: config.scheduler_config.disable_hybrid_kv_cache_manager,
        ),
        "leave out --disable-hybrid-kv-cache-manager",
    ),
    Refusal(
        "full attention in several KV cache groups",
        both(_mixes_windows, lambda config: sliding_groups(config).num_full_groups > 1),
        "serve a model with fewer layers of full attention than with sliding windows, "
        "or with less than half as many more",
    ),
    Refusal(
        "per-head lengths with sliding-window layers",
        both(_mixes_windows, is_ragged),
        "choose a policy whose heads keep equal numbers of tokens, without "
        + ", ".join(f"`{name}`" for name in SELECTIONS),
    ),
    Refusal(
        f"sliding-window layers with a policy for the model's own weights ({FITTED})",
        both(_mixes_windows, is_fitted),
        "choose another policy: no file was made or tested for such a model",
    ),
    Refusal(
        "FP8 KV caches with sliding-window layers",
        both(_mixes_windows, is_float8),
        "leave out --kv-cache-dtype",
    ),
    Refusal(
        "speculative decoding with sliding-window layers",
        both(_mixes_windows, speculates),
        "leave out --speculative-config",
    ),
    Refusal(
        "sliding-window layers on GPUs",
        both(_mixes_windows, is_on_gpu),
        "serve a model whose layers all attend to the whole context: no GPU has run a "
        "policy beside windows",
    ),
    Refusal(
        "layers other than full attention and sliding windows",
        lambda config: bool(set(layer_kinds(config)) - {FULL, SLIDING}),
        "serve a model whose layers all attend to the whole context",
    ),
    Refusal(
        "attention layers of a model's own",
        _attends_by_itself,
        "serve a model with vLLM's own layers of full attention or sliding windows",
    ),
    Refusal(
        "layers that differ in heads or head sizes",
        _differs,
        "serve a model whose layers differ in their windows alone",
    ),
    Refusal(
        "sliding windows of several sizes, or of others than `sliding_window`",
        _has_other_windows,
        "serve a model whose windows all have the size that it names",
    ),
    Refusal(
        "ALiBi, whose biases depend on distances that events change",
        lambda config: bool(_is_one_of(compat.ALIBI, config) or _text(config, "alibi")),
        "serve a model with rotary positions",
    ),
    Refusal(
        "attention logit soft caps, which scorers do not model",
        lambda config: bool(_text(config, "attn_logit_softcapping")),
        "serve a model without attn_logit_softcapping",
    ),
    Refusal(
        "learned sinks of other models than gpt-oss",
        _has_unknown_sinks,
        "serve a model without learned sinks, or gpt-oss",
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
    # How it rotates.
    Refusal(
        "dual chunk attention",
        lambda config: bool(
            getattr(
                config.model_config.hf_text_config, "dual_chunk_attention_config", None
            )
        ),
        "serve a model without `dual_chunk_attention_config`",
    ),
    Refusal(
        f"Fourier position embeddings (FoPE) with {ROTATING}",
        both(
            reads_rotations,
            lambda config: any(each.get("use_fope") for each in _parameters(config)),
        ),
        "choose another policy",
    ),
    Refusal(
        f"heads with a rotated part of their own (`qk_rope_head_dim`) with {ROTATING}",
        both(
            reads_rotations,
            lambda config: (
                getattr(config.model_config.hf_text_config, "qk_rope_head_dim", None)
                and not config.model_config.use_mla
            ),
        ),
        "choose another policy",
    ),
    Refusal(
        "the Transformers backend where rotations depend on the length of a text, or "
        f"its code leaves them out in some layers, with {ROTATING}",
        both(reads_rotations, _code_decides),
        "leave out --model-impl, or choose another policy",
    ),
    # Learned sinks.
    Refusal(
        f"learned sinks (gpt-oss) with attention of a policy's own "
        f"({listed('weighs_itself')})",
        both(compat.has_learned_sinks, has_word_with("weighs_itself")),
        "choose other policies, also in `allow`: theirs leaves sinks out",
    ),
    Refusal(
        "per-head lengths with learned sinks",
        both(compat.has_learned_sinks, is_ragged),
        "choose policies whose heads keep equal numbers of tokens, also in `allow`",
    ),
    Refusal(
        "tensor parallelism with learned sinks",
        both(
            compat.has_learned_sinks,
            lambda config: config.parallel_config.tensor_parallel_size > 1,
        ),
        "set --tensor-parallel-size 1",
    ),
    Refusal(
        "speculative decoding with learned sinks",
        both(compat.has_learned_sinks, speculates),
        "leave out --speculative-config",
    ),
    Refusal(
        "LoRA adapters with learned sinks",
        both(compat.has_learned_sinks, has_adapters),
        "leave out --enable-lora, or merge the adapter into the model",
    ),
    Refusal(
        "weight transfer with learned sinks",
        both(compat.has_learned_sinks, transfers_weights),
        "leave out --weight-transfer-config",
    ),
    Refusal(
        "FP8 KV caches with learned sinks",
        both(compat.has_learned_sinks, is_float8),
        "leave out --kv-cache-dtype",
    ),
    Refusal(
        "learned sinks on GPUs",
        both(compat.has_learned_sinks, is_on_gpu),
        "serve a model without learned sinks: no GPU has run a policy with them",
    ),
    # What it is.
    Refusal(
        "pooling models",
        lambda config: config.model_config.runner_type != "generate",
        "leave out --kv-policy: these models do not generate tokens",
    ),
    Refusal(
        "encoder-decoder models",
        lambda config: config.model_config.is_encoder_decoder,
        "serve a decoder-only model",
    ),
    Refusal(
        "prefix-LM attention",
        lambda config: config.model_config.is_mm_prefix_lm,
        "serve a model with causal attention",
    ),
    Refusal(
        "residual sliding-window attention (R-SWA)",
        lambda config: config.model_config.rswa_window is not None,
        "serve a model whose layers all attend to the whole context",
    ),
    Refusal(
        "diffusion models",
        lambda config: (
            config.diffusion_config is not None or config.model_config.is_diffusion
        ),
        "serve an autoregressive model",
    ),
    Refusal(
        "images, audio and video",
        lambda config: config.model_config.supports_multimodal_inputs,
        "add --language-model-only to serve a multimodal model for text",
    ),
    Refusal(
        f"multimodal models with a policy for the model's own weights ({FITTED})",
        both(is_fitted, lambda config: config.model_config.is_multimodal_model),
        "serve a text model: no files were made or tested for text parts of others",
    ),
)
