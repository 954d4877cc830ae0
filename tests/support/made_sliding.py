"""Writes random Gemma 3 models: one layer of full attention to some with a window."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

WINDOW = 48
KINDS = "sliding_attention", "full_attention"
PATTERN = (0, 0, 1, 0, 0, 0, 1)  # of `KINDS`: groups of two layers, one of them padded
NUM_FULL, NUM_GROUPS = 2, 3


def make_gemma3(
    path: Path | str,
    seed: int = 3,
    num_kv_heads: int = 2,
    pattern: tuple[int, ...] = PATTERN,
) -> Path:
    """Write a model of 7 layers of 4 query heads, float32; return its folder.

    Attention is sharp and the residual stream is not drowned by the embedding, so that
    what is in the KV cache decides about tokens.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(pattern),
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        layer_types=[KINDS[kind] for kind in pattern],
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Gemma3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(0.7)  # Gemma adds one
            elif "norm" not in name:
                size = weight.shape[-1] ** -0.5
                size *= 0.3 if "embed" in name else 2.0 if "lm_head" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    model.save_pretrained(path)
    return Path(path)


class MixedDecoder:
    """Transformers' model, whose layers of full attention see what a mask shows.

    It stands in for `ReferenceDecoder` in the replay oracle: its layers are those of
    full attention, and layers with a window see the window.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.kinds = self.model.config.layer_types
        self.num_layers, self.num_heads = self.kinds.count(KINDS[1]), 2

    @torch.no_grad()
    def forward(self, tokens: list[int], visible: torch.Tensor) -> SimpleNamespace:
        """Return the logits [T, V] of a sequence; `visible` is [L, H, T, T] bool."""
        full = iter(visible)
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                _with_mask(next(full)), with_kwargs=True
            )
            for layer, kind in zip(self.model.model.layers, self.kinds, strict=True)
            if kind == KINDS[1]
        ]
        try:
            return SimpleNamespace(logits=self.model(torch.tensor([tokens])).logits[0])
        finally:
            for hook in hooks:
                hook.remove()


def _with_mask(visible: torch.Tensor) -> Any:
    """Return a hook that puts a mask of [H, T, T] bool in place of the causal one."""
    bias = torch.where(visible.repeat_interleave(2, 0), 0.0, -torch.inf)[None]

    def put(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        assert "attention_mask" in kwargs
        return args, {**kwargs, "attention_mask": bias}

    return put
