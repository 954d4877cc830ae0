"""Refuses what a policy is not tested with: rotations that no loaded model shows."""

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_kvpolicy.api.refusal import Refusal, listed
from vllm_kvpolicy.config import server_config

ROTATING = listed("rotates")
# Model types whose code in Transformers decides by itself which layers rotate; vLLM's
# own code of these models says it in attributes, see worker.rotary.
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


def _read_and(applies: Callable[[Any], object], config: Any) -> bool:
    """Return whether a policy reads rotations, and `applies`."""
    server = server_config(config)
    return (
        server is not None
        and any(word.rotates for word in server.words)
        and bool(applies(config))
    )


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


ROTARY_REFUSALS = (
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
        partial(
            _read_and,
            lambda config: any(each.get("use_fope") for each in _parameters(config)),
        ),
        "choose another policy",
    ),
    Refusal(
        f"heads with a rotated part of their own (`qk_rope_head_dim`) with {ROTATING}",
        partial(
            _read_and,
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
        partial(_read_and, _code_decides),
        "leave out --model-impl, or choose another policy",
    ),
)
