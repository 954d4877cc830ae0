"""Writes small random models in which few layers keep all tokens.

Others keep a state or a window, which has other heads in Gemma 4 and MiMo-V2.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

from support.made_sliding import PATTERN
from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer
from vllm_kvpolicy.commands.trials import (
    LATENT,
    NUM_TOKENS,
    ROTATED,
    WINDOW,
    gemma4,
    make_gemma3,
    make_gpt_oss,
    make_lfm2,
    sizes,
    write,
)

FULL, LINEAR = "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {"partial_rotary_factor": 0.5}
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


def _gemma3n() -> Any:
    """Return one of two decoders, the second of which reads keys of the first."""
    kinds = ["sliding_attention", "full_attention"]
    pattern = [kinds["wf".index(each)] for each in "wwfwwfwwwf"]
    rope = [{**ROPE, "rope_theta": theta} for theta in (1e4, 1e6)]
    return transformers.Gemma3nTextConfig(
        num_hidden_layers=len(pattern),
        layer_types=pattern,
        num_kv_shared_layers=4,
        sliding_window=WINDOW,
        rope_parameters=dict(zip(kinds, rope, strict=True)),
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=NUM_TOKENS,
        laurel_rank=16,
        activation_sparsity_pattern=[0.0] * len(pattern),
        **sizes(tie_word_embeddings=True),
    )


def _mimo_v2() -> Any:
    """Return one whose windows have twice as many KV heads, and learned sinks.

    Values have the size of keys. vLLM reads other fields than Transformers.
    """
    pattern, sparse, heads = [0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 1], 8
    thetas = {"full_attention": 5e6, "sliding_attention": 1e4}
    read_by_vllm = {
        "hybrid_layer_pattern": pattern,
        "moe_layer_freq": sparse,
        "sliding_window_size": WINDOW,
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
        "rope_theta": thetas["full_attention"],
        "swa_rope_theta": thetas["sliding_attention"],
        "layernorm_epsilon": 1e-5,
        **HALF,
    }
    return transformers.MiMoV2FlashConfig(
        num_hidden_layers=len(pattern),
        layer_types=[list(thetas)[kind] for kind in pattern],
        mlp_layer_types=[("dense", "sparse")[each] for each in sparse],
        rope_parameters={
            kind: {**ROPE, **HALF, "rope_theta": thetas[kind]} for kind in thetas
        },
        sliding_window=WINDOW,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **read_by_vllm,
        **sizes(num_attention_heads=heads),
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "granite4": _granite4,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "gemma4_31b": _gemma4_31b,
    "gemma4_e2b": _gemma4_e2b,
    "deepseek_v3": _deepseek_v3,
    "glm4_lite": _glm4_lite,
    "mimo_v2": _mimo_v2,
    "gemma3n": _gemma3n,
}
OF_TRIALS: dict[str, Callable[[Path], Path]] = {
    "gemma3": make_gemma3,
    # The first layer is one of full attention.
    "reversed_gemma3": partial(make_gemma3, pattern=PATTERN[::-1]),
    "gpt_oss": make_gpt_oss,
    "lfm2": make_lfm2,
}
# Where full attention has superblocks of 64 tokens, since windows keep more of each.
DOUBLED = ("gemma4_31b", "mimo_v2")
# Of `write`: logits that are not divided by the root of a head's size are large, and
# MiMo-V2 has no norms of queries and keys.
WEIGHTS: dict[str, dict[str, Any]] = {
    "gemma4_31b": {"norms": 1.2},
    "gemma4_e2b": {"norms": 1.2},
    "gemma3n": {"norms": 1.2},
    "mimo_v2": {"norms": None, "sharp": 1.5},
}
LATENTS = ("deepseek_v3", "glm4_lite")  # whose heads share a vector per token
# What stock vLLM needs on a CPU: its kernel there rotates queries of LFM2's shape by
# wrong positions, its Mamba2 caches no prefixes, its gated delta net is of bfloat16.
SETTINGS: dict[str, dict[str, Any]] = {
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
            "max_num_batched_tokens": 2048,  # stock cuts no prompts
            "enable_prefix_caching": False,
        },
    ),
}


def make(name: str, path: Path) -> Path:
    """Write a model, and a tokenizer, into a folder; return that."""
    if name in OF_TRIALS:
        OF_TRIALS[name](path)
    else:
        write(path, FAMILIES[name](), seed=5, **WEIGHTS.get(name, {"norms": 1.5}))
    if name == "gemma3n":
        # vLLM's text model leaves these out; with images it adds them.
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens_per_layer.weight"].zero_()
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, [*SPECIAL_TOKENS, *CHARACTERS], 4096)
    return path
