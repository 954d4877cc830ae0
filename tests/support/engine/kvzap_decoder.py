"""A plain decoder that scores tokens with a surrogate of KVzap.

Written from the paper's rule; shares no code with the plugin.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from support.engine.reference_decoder import ReferenceDecoder

NEAR = 1e-4


class KVzapDecoder(ReferenceDecoder):
    """Qwen3 with a surrogate beside each layer's attention.

    Args:
        tensors: the surrogate, as its file names them.
        hides: hide tokens below the threshold by the closed form, too.
        threshold: score that a token needs to stay.
        recent: tokens before itself that every query sees.
        sinks: first tokens that stay in any case.
        dense: queries at positions below this see everything, as in kvpress' prefill.

    After a forward pass `rows` has the scores [H, T] of each layer, and `inputs` what
    the surrogate was given, [T, d].
    """

    def __init__(
        self,
        folder: Path | str,
        tensors: Mapping[str, torch.Tensor],
        hides: bool = False,
        threshold: float = -4.0,
        recent: int = 128,
        sinks: int = 0,
        dense: int = 0,
    ) -> None:
        super().__init__(folder)
        self.tensors, self.hides, self.threshold = tensors, hides, threshold
        self.recent, self.sinks, self.dense = recent, sinks, dense
        self.inputs: dict[int, torch.Tensor] = {}

    def decisions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [L, H, T] bool: what is dropped, and what may go either way."""
        above = torch.stack(self.rows) - self.threshold
        return above < 0, above.abs() < NEAR

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        name = f"model.layers.{layer}.input_layernorm.weight"
        normed = self._norm(hidden, name)
        score = self._score(layer, normed).T
        self.rows.append(score)
        self.inputs[layer] = normed
        if self.hides:
            place = torch.arange(len(normed))
            age = place[:, None] - place
            kept = (score >= self.threshold) | (place < self.sinks)
            seen = (age <= self.recent) | kept[:, None] | (place < self.dense)[:, None]
            visible = visible & seen
        return super()._attention(layer, hidden, visible)

    def _score(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return [T, H] scores of [T, d]."""
        name = f"layers.{layer}"
        if f"{name}.0.weight" in self.tensors:
            units = self._linear(f"{name}.0", hidden)
            hidden = units * (1 + torch.erf(units / 2**0.5)) / 2
            name += ".2"
        return self._linear(name, hidden)

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]
