"""A plain decoder of the made Gemma 3: one layer of full attention to some windows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvpolicy.commands.trials import KINDS

PATTERN = (0, 0, 1, 0, 0, 0, 1)  # of `KINDS`: groups of two layers, one of them padded
NUM_FULL, NUM_GROUPS = 2, 3


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
