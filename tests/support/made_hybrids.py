"""Writes small random models in which few layers keep all tokens.

Others keep a state or a window; those of Gemma 4 have heads of another size as well.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer
from vllm_kvpolicy.commands.trials import (
    LATENT,
    ROTATED,
    gemma4,
    make_lfm2,
    sizes,
    write,
)

FULL, LINEAR = "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QUARTER = {**ROPE, "partial_rotary_factor": 0.25}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_head": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _granite4() -> Any:
    return transformers.GraniteMoeHybridConfig(
        num_hidden_layers=6,
        layer_types=[LINEAR, LINEAR, FULL] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="nope",
        attention_multiplier=0.5,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        rope_parameters=ROPE,
        **{**MAMBA2, "mamba_d_head": 64},
        **sizes(hidden_size=128),  # of which vLLM makes heads
    )


def _nemotron_h() -> Any:
    return transformers.NemotronHConfig(
        layers_block_type=[LINEAR, "mlp", FULL, LINEAR, "mlp", LINEAR, FULL, LINEAR],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=2,
        chunk_size=32,
        time_step_limit=[0.0, 1e9],
        **sizes(),
    )


def _falcon_h1() -> Any:
    return transformers.FalconH1Config(
        num_hidden_layers=3,
        mamba_d_ssm=128,
        mamba_norm_before_gate=False,
        mamba_rms_norm=False,
        rope_parameters=ROPE,
        **MAMBA2,
        **sizes(),
    )


def _qwen3_next() -> Any:
    return transformers.Qwen3NextConfig(
        num_hidden_layers=8,
        layer_types=[LINEAR, LINEAR, LINEAR, FULL] * 2,
        rope_parameters=QUARTER,
        shared_expert_intermediate_size=64,
        **EXPERTS,
        **DELTA,
        **sizes(head_dim=128, num_attention_heads=8, num_key_value_heads=4),
    )


def _gemma4_31b() -> Any:
    """Return one whose full attention keeps half as much of a token as its windows."""
    heads = {"num_key_value_heads": 8, "num_global_key_value_heads": 2}
    return gemma4("wwfwwf", 32, num_attention_heads=8, **heads)


def _gemma4_e2b() -> Any:
    """Return one whose full attention keeps twice as much, for later layers, too."""
    shared = {"num_kv_shared_layers": 4, "hidden_size_per_layer_input": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return gemma4("wwfwwfwwwf", 32, attention_k_eq_v=False, **heads, **shared)


def _deepseek_v3() -> Any:
    return transformers.DeepseekV3Config(**LATENT)


def _glm4_lite() -> Any:
    """Return one whose queries are not a whole number of rows: GLM-4.7-Flash."""
    heads = {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 48}
    kinds = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    return transformers.Glm4MoeLiteConfig(**{**LATENT, **heads, **kinds})


FAMILIES: dict[str, Callable[[], Any]] = {
    "granite4": _granite4,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "gemma4_31b": _gemma4_31b,
    "gemma4_e2b": _gemma4_e2b,
    "deepseek_v3": _deepseek_v3,
    "glm4_lite": _glm4_lite,
}
LATENTS = ("deepseek_v3", "glm4_lite")  # whose heads share a vector per token
# What stock vLLM needs on a CPU: its kernel there rotates queries of LFM2's shape by
# wrong positions, its Mamba2 caches no prefixes, its gated delta net is of bfloat16.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4_31b": {},
    "gemma4_e2b": {},
    "lfm2": ROTATED,
    "granite4": {"enable_prefix_caching": False},
    "nemotron_h": {"enable_prefix_caching": False},
    "falcon_h1": {"enable_prefix_caching": False},
    "qwen3_next": {"dtype": "bfloat16"},
    **dict.fromkeys(
        LATENTS,
        {
            **ROTATED,  # for the same reason
            "attention_backend": "CPU_MLA",
            "enable_prefix_caching": False,
        },
    ),
}


def make(name: str, path: Path) -> Path:
    """Write the model of a family, and a tokenizer, into a folder; return that."""
    if name == "lfm2":
        make_lfm2(path)
    else:
        # Where logits are not divided by the root of a head's size, they are large.
        norms = 1.2 if name.startswith("gemma4") else 1.5
        write(path, FAMILIES[name](), seed=5, norms=norms)
    write_tokenizer(path, [*SPECIAL_TOKENS, *CHARACTERS], 4096)
    return path
