"""Writes small random models with layers that draft: GLM-4.5 and Llama with EAGLE.

A token mostly follows from the one before it, which is what drafters see; sometimes the
target's attention decides otherwise. So some drafts are accepted and some are not.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 4, 2, 32
VOCABULARY = [*SPECIAL_TOKENS, *CHARACTERS]
NUM_LAYERS = {"glm": 2, "llama": 7}  # EAGLE-3 reads the hidden states of three
NUM_EXPERTS = 4
SHARPNESS = 2.0  # of attention
FOLLOWING = 12.0  # how surely a token follows from the one before


class _Weights:
    """Draws weights."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, rows: int, columns: int, size: float = 1.0) -> torch.Tensor:
        noise = torch.randn(rows, columns, generator=self._generator)
        return noise * size * columns**-0.5

    def mlp(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": self.linear(INNER, HIDDEN),
            f"{prefix}.up_proj.weight": self.linear(INNER, HIDDEN),
            f"{prefix}.down_proj.weight": self.linear(HIDDEN, INNER, 0.5),
        }

    def experts(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return a mixture of experts, two of four for each token."""
        found = self.mlp(f"{prefix}.shared_experts")
        for expert in range(NUM_EXPERTS):
            found |= self.mlp(f"{prefix}.experts.{expert}")
        found[f"{prefix}.gate.weight"] = self.linear(NUM_EXPERTS, HIDDEN)
        found[f"{prefix}.gate.e_score_correction_bias"] = torch.zeros(NUM_EXPERTS)
        return found

    def block(self, prefix: str, width: int, biased: bool) -> dict[str, torch.Tensor]:
        """Return a transformer block whose attention reads `width` channels."""
        queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        found = {
            "input_layernorm.weight": torch.ones(HIDDEN),
            "post_attention_layernorm.weight": torch.ones(HIDDEN),
            "self_attn.q_proj.weight": self.linear(queries, width, SHARPNESS),
            "self_attn.k_proj.weight": self.linear(keys, width, SHARPNESS),
            "self_attn.v_proj.weight": self.linear(keys, width),
            "self_attn.o_proj.weight": self.linear(HIDDEN, queries, 0.5),
            **self.mlp("mlp"),
        }
        sizes = {"q": queries, "k": keys, "v": keys} if biased else {}
        for name, size in sizes.items():
            found[f"self_attn.{name}_proj.bias"] = self.linear(1, size, 0.3)[0]
        return {f"{prefix}.{name}": weight for name, weight in found.items()}


def _config(architecture: str, model_type: str, layers: int, **more: Any) -> Any:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **more,
    }


def _save(path: Path, config: Any, weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    save_file(
        {k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors"
    )
    write_tokenizer(path, VOCABULARY, 4096)
    return path


def _target(draw: _Weights, layers: int, biased: bool) -> dict[str, torch.Tensor]:
    """Return a decoder in which each token has one that tends to follow."""
    embedded = draw.linear(len(VOCABULARY), HIDDEN, HIDDEN**0.5)
    order = torch.randperm(len(VOCABULARY) - 3, generator=draw._generator) + 3
    head = draw.linear(len(VOCABULARY), HIDDEN, 2.0)
    head[order] += FOLLOWING * embedded[3:] / HIDDEN
    weights = {
        "model.embed_tokens.weight": embedded,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(layers):
        weights |= draw.block(f"model.layers.{layer}", HIDDEN, biased)
    return weights


def make_glm(path: Path, seed: int = 3) -> Path:
    """Write a GLM-4.5 with a layer that predicts one token more; return its folder."""
    draw, layers = _Weights(seed), NUM_LAYERS["glm"]
    weights, last = _target(draw, layers, biased=False), f"model.layers.{layers}"
    weights |= draw.block(last, HIDDEN, biased=False)
    for layer in range(1, layers + 1):
        dense = f"model.layers.{layer}.mlp"
        weights = {k: v for k, v in weights.items() if not k.startswith(dense)}
        weights |= draw.experts(dense)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{last}.{name}.weight"] = torch.ones(HIDDEN)
    passed = torch.cat([2 * torch.eye(HIDDEN), 0.2 * torch.eye(HIDDEN)], 1)
    weights[f"{last}.eh_proj.weight"] = passed
    mixture = {
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": INNER,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    more = {"attention_bias": False, "num_nextn_predict_layers": 1, **mixture}
    return _save(
        path, _config("Glm4MoeForCausalLM", "glm4_moe", layers, **more), weights
    )


def make_llama(path: Path, kind: str, seed: int = 3) -> tuple[Path, Path]:
    """Write a Llama and a drafter for it, "eagle" or "eagle3"; return their folders."""
    draw, layers = _Weights(seed), NUM_LAYERS["llama"]
    weights = _target(draw, layers, biased=False)
    none = {"attention_bias": False, "mlp_bias": False}
    config = _config("LlamaForCausalLM", "llama", layers, **none)
    target = _save(path / "target", config, weights)
    if kind == "eagle":
        own = draw.block("layers.0", HIDDEN, biased=False)
        del own["layers.0.input_layernorm.weight"]
        own["fc.weight"] = torch.cat(
            [3 * torch.eye(HIDDEN), 0.2 * torch.eye(HIDDEN)], 1
        )
        config = _config("EagleLlamaForCausalLM", "llama", 1, **none)
        return target, _save(path / kind, config, own)
    own = draw.block("midlayer", 2 * HIDDEN, biased=True)
    for name in "qk":  # so that near tokens get more of the attention than far ones
        own[f"midlayer.self_attn.{name}_proj.bias"].fill_(2.0)
    eye = torch.eye(HIDDEN)  # of the token that a query and a key belong to
    own["midlayer.self_attn.v_proj.bias"].zero_()
    own["midlayer.self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
    own["midlayer.self_attn.v_proj.weight"] = torch.cat([3 * eye, 0 * eye], 1)
    heads = eye.unflatten(1, (KV_HEADS, HEAD_DIM)).repeat_interleave(2, 1)
    own["midlayer.self_attn.o_proj.weight"] = heads.flatten(1) / 2
    own |= {
        "midlayer.hidden_norm.weight": torch.full((HIDDEN,), 0.3),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": draw.linear(HIDDEN, 3 * HIDDEN),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    config = _config("LlamaForCausalLMEagle3", "llama", 1, mlp_bias=False)
    drafter = config | {"attention_bias": True, "draft_vocab_size": len(VOCABULARY)}
    return target, _save(path / kind, drafter, own)
