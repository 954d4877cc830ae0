"""A plain decoder that asks write gates about its own keys."""

from pathlib import Path

import torch
import torch.nn.functional as F

from support.engine.admissions import closed_form
from support.engine.reference_decoder import ReferenceDecoder
from vllm_kvpolicy.policies.admissions.wgkv import Gates

NEAR = 1e-4


class GatedDecoder(ReferenceDecoder):
    """Qwen3 with gates as their authors have them: grouped convolutions over tokens.

    Args:
        gates: with their window and sinks.
        hides: hide tokens that are not admitted by the closed form, too.
        threshold: a token stays whose gate is above this.

    After a forward pass `rows` has the gates [H, T] of each layer.
    """

    def __init__(
        self, folder: Path, gates: Gates, hides: bool = False, threshold: float = 0.5
    ) -> None:
        super().__init__(folder)
        self.gates, self.hides, self.threshold = gates, hides, threshold

    def decisions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [L, H, T] bool: what is dropped, and what may go either way."""
        above = torch.stack(self.rows) - self.threshold
        return above <= 0, above.abs() < NEAR

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        prefix = f"model.layers.{layer}."
        normed = self._norm(hidden, prefix + "input_layernorm.weight")
        prefix += "self_attn."
        key = self._heads(normed, prefix + "k_proj.weight", prefix + "k_norm.weight")
        values = self._gate(layer, key, self._rotate(key))
        self.rows.append(values)
        if self.hides:
            kept = values > self.threshold
            visible = visible & closed_form(kept, self.gates.window, self.gates.sinks)
        return super()._attention(layer, hidden, visible)

    def _gate(
        self, layer: int, before: torch.Tensor, after: torch.Tensor
    ) -> torch.Tensor:
        """Return [H, T] gates of keys [H, T, D] before and after RoPE."""
        start = Gates.full_name(layer, "")
        own = {
            name.removeprefix(start): tensor
            for name, tensor in self.gates.tensors.items()
            if name.startswith(start)
        }
        parts = [
            F.rms_norm(part, part.shape[-1:], own[f"{side}_key_norm.weight"], 1e-6)
            for side, part in (("pre", before), ("post", after))
        ]
        rows = torch.cat(parts, -1).transpose(1, 2).flatten(0, 1)[None]
        for number in (1, 2):
            weight, bias = own[f"conv{number}.weight"], own[f"conv{number}.bias"]
            rows = F.conv1d(rows, weight, bias, groups=self.num_heads)
            rows = F.gelu(rows) if number == 1 else rows.sigmoid()
        return rows[0]
