"""What `verify --feature` serves: a tiny random model, and the feature switched on.

Nothing is fetched: models are made by Transformers' own classes, and requests are
numbers. Attention is sharp and the output layer strong, so that what is in the KV cache
decides about tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    Qwen3Config,
)

WINDOW = 48
KINDS = "sliding_attention", "full_attention"
NUM_TOKENS = 99  # in the vocabulary
# Of queries and keys.
NORMS = tuple(f"{each}_{end}.weight" for each in "qk" for end in ("norm", "layernorm"))
UNIT_TOKENS = 24  # that prompts repeat, so that n-grams find drafts


def make_qwen3(path: Path) -> Path:
    """Write a model of 2 layers of full attention; see `write`, as of all these."""
    return write(path, Qwen3Config(num_hidden_layers=2, **sizes()), norms=1.5)


def make_gemma3(
    path: Path, num_kv_heads: int = 2, pattern: Sequence[int] = (0, 0, 1, 0, 0, 0, 1)
) -> Path:
    """Write a model with sliding windows of 48 tokens.

    The pattern is of indices into KINDS, by default two layers of full attention and
    five with a window: groups of two layers, one of them padded.
    """
    config = Gemma3TextConfig(
        num_hidden_layers=len(pattern),
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=[KINDS[kind] for kind in pattern],
        **sizes(num_key_value_heads=num_kv_heads),
    )
    return write(path, config, norms=0.7)  # Gemma adds one


def gemma4(pattern: str, head_dim: int, **changes: Any) -> Any:
    """Return the configuration of a Gemma 4 with a layer for each letter, w or f.

    Heads of layers with a window, w, are half as large as those of full attention, f.

    Args:
        head_dim: of layers with a window.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    whole = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    given = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": NUM_TOKENS,
        "tie_word_embeddings": True,
        "attention_k_eq_v": True,
        **changes,
    }
    return Gemma4TextConfig(
        num_hidden_layers=len(pattern),
        layer_types=[KINDS["wf".index(each)] for each in pattern],
        sliding_window=WINDOW,
        global_head_dim=2 * head_dim,
        rope_parameters={KINDS[0]: rope, KINDS[1]: {**whole, "rope_theta": 1e6}},
        **sizes(head_dim=head_dim, **given),
    )


def make_gemma4(path: Path) -> Path:
    """Write a Gemma 4 whose full attention keeps half as much as its windows."""
    heads = {"num_key_value_heads": 4, "num_global_key_value_heads": 1}
    return write(path, gemma4("wwfwwf", 256, **heads), norms=0.7)


def make_gpt_oss(path: Path) -> Path:
    """Write a gpt-oss of 4 layers, every other with a window.

    Learned sinks take about half of a head's attention, more in some heads than others.
    """
    config = GptOssConfig(
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=[KINDS[layer % 2] for layer in range(4)],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        **sizes(intermediate_size=64),
    )
    return write(path, config, norms=None, sharp=1.5)


def make_lfm2(path: Path) -> Path:
    """Write an LFM2 of two layers of full attention and four short convolutions."""
    config = Lfm2Config(
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention"] * 2,
        block_dim=128,
        conv_dim=128,
        block_auto_adjust_ff_dim=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        # vLLM ties them whatever the configuration says.
        **sizes(hidden_size=128, tie_word_embeddings=True),
    )
    return write(path, config, norms=1.5)


def make_deepseek(path: Path) -> Path:
    """Write a DeepSeek-V3 whose latent vectors have the released models' size."""
    return write(path, DeepseekV3Config(**LATENT), norms=1.5)


def sizes(**changes: Any) -> dict[str, Any]:
    """Return what the configurations of all made models have in common."""
    return {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        **changes,
    }


LATENT = {
    **sizes(num_key_value_heads=4, head_dim=64),
    "num_hidden_layers": 3,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",  # vLLM then expects the bias that Transformers writes
    "scoring_func": "sigmoid",  # as Transformers always does
}
"""What configurations of models with latent vectors (MLA) have in common."""


def write(
    path: Path, config: Any, norms: float | None, sharp: float = 1.0, seed: int = 3
) -> Path:
    """Write a model of random weights, float32; return its folder.

    Args:
        norms: weight of the norms of queries and keys; None for a model without.
        sharp: by how much the projections of queries and keys are larger than others.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            size = config.hidden_size**-0.5
            if name.endswith(NORMS):
                weight.fill_(norms)
            elif name.endswith("sinks"):
                weight.copy_(5 + 1.5 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "norm" not in name:
                size = size if norms is None else weight.shape[-1] ** -0.5
                embedded = 1.0 if config.tie_word_embeddings else 0.3
                size *= embedded if "embed" in name else 1.0
                size *= 2.0 if "lm_head" in name else 1.0
                size *= sharp if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(size * noise)
    model.save_pretrained(path)
    return path


def numbers(seed: int, length: int) -> list[int]:
    """Return a prompt of `length` token ids that repeats itself with changes."""
    draw = Random(seed)
    unit = [draw.randrange(3, NUM_TOKENS) for _ in range(UNIT_TOKENS)]
    found: list[int] = []
    while len(found) < length:
        unit[draw.randrange(UNIT_TOKENS)] = draw.randrange(3, NUM_TOKENS)
        found += unit
    return found[:length]


@dataclass(frozen=True)
class Trial:
    """How `verify` serves one feature, and which engines it compares.

    Args:
        settings: of vLLM's EngineArgs, beside those that all engines have.
        has_stock: stock vLLM computes the same; else a policy without events stands in.
        is_ragged: heads may have lengths of their own.
        gpu_dtypes: of the model, one after the other.
        on_cpu: CPUs have it, too, and start several engines with it in a process.
        of_mover: further settings, of the engine alone that moves tokens.
    """

    make: Callable[[Path], Path] = make_qwen3
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_stock: bool = True
    is_ragged: bool = True
    gpu_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    on_cpu: bool = True
    of_mover: Mapping[str, Any] = field(default_factory=dict)


# vLLM's kernel for CPUs rotates queries of some shapes by wrong positions.
ROTATED = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


def _drafting(method: str, **more: Any) -> Trial:
    values = {"method": method, "num_speculative_tokens": 3, **more}
    return Trial(settings={"speculative_config": values}, on_cpu=False)


TRIALS = {
    "card": Trial(on_cpu=False),
    # Stock's queries are FP8, too, and its attention FlashAttention's on some GPUs.
    "fp8": Trial(settings={"kv_cache_dtype": "fp8"}, has_stock=False),
    "windows": Trial(make_gemma3),
    "heads": Trial(make_gemma4),
    "sinks": Trial(make_gpt_oss, is_ragged=False),
    "states": Trial(make_lfm2, settings=ROTATED),
    "latents": Trial(
        make_deepseek,
        settings=ROTATED,
        is_ragged=False,
        gpu_dtypes=("bfloat16",),
    ),
    # vLLM has room for one such engine in a process.
    "sleep": Trial(is_ragged=False, on_cpu=False, of_mover={"enable_sleep_mode": True}),
    "ngram": _drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": _drafting("suffix"),
    "flashinfer": Trial(
        settings={"attention_backend": "FLASHINFER"},
        is_ragged=False,
        gpu_dtypes=("bfloat16",),
        on_cpu=False,
    ),
}
"""By the names of `api.evidence.FEATURES`."""
