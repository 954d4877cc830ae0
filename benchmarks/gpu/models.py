"""Owns the models that are measured: shapes of real ones, weights drawn at random.

No weights can be fetched where a GPU has no network, and speed hardly depends on them.
"""

import json
from pathlib import Path
from typing import Any

import torch

# Numbers of the published configurations.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY = QWEN | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": None,
    "eos_token_id": 1,
}
SHARED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA | SHARED,
    "qwen3-8b": QWEN | SHARED,
    "tiny": TINY | SHARED,
}
"""By name; `tiny` is for trying the measurements out on a CPU."""
SEED = 0
DRAWN = "drawn"
GAINS = {"qkv_proj": 1.5, "q_norm": 1.5, "k_norm": 1.5, "lm_head": 4.0}
"""Parts of the names of weights that are larger than others of their kind."""


def write_model(name: str, folder: Path) -> Path:
    """Write a model folder without weights and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
    return folder


def token_bytes(name: str, value_bytes: int = 2) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        value_bytes: of a number in the KV cache.
    """
    shape = SHAPES[name]
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    return 2 * heads * shape["head_dim"] * value_bytes


def weight_bytes(name: str, value_bytes: int = 2) -> int:
    """Return the bytes of a model's weights."""
    shape = SHAPES[name]
    width, size = shape["hidden_size"], shape["head_dim"]
    heads = 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    layer = width * (heads * size + 3 * shape["intermediate_size"])
    embedded = 2 * shape["vocab_size"] * width
    return value_bytes * (shape["num_hidden_layers"] * layer + embedded)


def drawn_weights() -> str:
    """Make vLLM able to draw weights; return the `load_format` that does it.

    vLLM's own dummy weights are so small that all tokens get the same logits.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class DrawnModelLoader(DummyModelLoader):
        """Draws weights once the model has been made."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill all parameters."""
            draw_weights(model)

    register_model_loader(DRAWN)(DrawnModelLoader)
    return DRAWN


@torch.no_grad()
def draw_weights(model: torch.nn.Module) -> None:
    """Fill a model's parameters so that answers depend on what is in its KV cache.

    Matrices are drawn with a variance of 1 / columns, embeddings with 1; norms are one.
    Attention is made sharp, and logits large.

    Args:
        model: changed in place; the same numbers each time on a kind of device.
    """
    weights = sorted(model.named_parameters())
    generator = torch.Generator(weights[0][1].device).manual_seed(SEED)
    for name, weight in weights:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else gain)
            continue
        width = 1 if "embed_tokens" in name else weight.shape[-1]
        weight.normal_(0.0, gain * width**-0.5, generator=generator)
