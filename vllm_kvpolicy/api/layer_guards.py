"""Refuses what a policy is not tested with: kinds of a model's attention layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_kvpolicy import compat
from vllm_kvpolicy.api.refusal import FITTED, Refusal, is_fitted, is_float8, is_ragged
from vllm_kvpolicy.policies.names import SELECTIONS
from vllm_kvpolicy.sizes import layer_kinds, sliding_groups

FULL, SLIDING = "full_attention", "sliding_attention"


def _beside(applies: Callable[[Any], object], config: Any) -> bool:
    """Return whether the model mixes full attention with windows, and `applies`."""
    return {FULL, SLIDING} <= set(layer_kinds(config)) and bool(applies(config))


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
            or set(layer_kinds(config)) == {SLIDING}
        ),
        "serve a model of which some layers attend to the whole context",
    ),
    *BESIDE_SLIDING,
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
)
