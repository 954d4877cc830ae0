"""Writes random gpt-oss models: sliding windows and learned sinks in every layer."""

from pathlib import Path

import torch

from support.made_sliding import KINDS, WINDOW
from support.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tokenizer

PATTERN = (0, 1, 0, 1)  # of `KINDS`, as the real model alternates
NUM_FULL = 2


def make_gpt_oss(path: Path | str, seed: int = 3) -> Path:
    """Write a model of 4 layers of 4 query and 2 KV heads, float32; return its folder.

    Sinks take about half of a head's attention, more in some heads than in others.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=len(PATTERN),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        layer_types=[KINDS[kind] for kind in PATTERN],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    generator = torch.Generator().manual_seed(seed)
    model = GptOssForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("sinks"):
                weight.copy_(5 + 1.5 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "norm" not in name:
                size = 64**-0.5
                size *= 0.3 if "embed" in name else 2.0 if "lm_head" in name else 1.0
                size *= 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(size * noise)
    model.save_pretrained(path)
    write_tokenizer(Path(path), [*SPECIAL_TOKENS, *CHARACTERS], 4096)
    return Path(path)
