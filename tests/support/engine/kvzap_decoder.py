"""A plain decoder that scores tokens with a surrogate of KVzap.

Written from the paper's rule; shares no code with the plugin.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from support.engine.reference_decoder import Activations, ReferenceDecoder


class KVzapDecoder(ReferenceDecoder):
    """Qwen3 with a surrogate beside each layer's attention.

    Args:
        folder: model folder.
        tensors: the surrogate, as its file names them.
        hides: hide tokens below the threshold by the closed form, too.
        threshold: score that a token needs to stay.
        recent: tokens before itself that every query sees.
        sinks: first tokens that stay in any case.
        dense: queries at positions below this see everything, as in kvpress' prefill.

    Attributes:
        inputs: after a forward pass, [L, T, d], what the surrogate was given.
        scores: after a forward pass, [L, H, T].
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
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(
        self, tokens: list[int], visible: torch.Tensor | None = None
    ) -> Activations:
        """Run a sequence; see the base class."""
        self.rows = []
        found = super().forward(tokens, visible)
        self.inputs, self.scores = map(torch.stack, zip(*self.rows, strict=True))
        return found

    def _attention(self, layer: int, hidden: torch.Tensor, visible: torch.Tensor):
        name = f"model.layers.{layer}.input_layernorm.weight"
        normed = self._norm(hidden, name)
        score = self._score(layer, normed).T
        self.rows.append((normed, score))
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
