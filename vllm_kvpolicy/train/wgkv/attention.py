"""A forward pass in which older keys are weighted by their gates.

Source: WG-KV (arXiv 2512.17452) section 3.4. Deviations: gates are evaluated in
float32, and the key before RoPE is computed from the rotated one, as in a server.
"""

from dataclasses import dataclass, field

import torch

from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate
from vllm_kvpolicy.train.attention import Student, hidden, weighed

LEAST = 1e-3  # smallest gate in a logarithm; there is no gradient below it


@dataclass
class Gating(Student):
    """The gating of one forward pass, and its gate values.

    Args:
        weights: gates of all layers.
        rope: the model's rotary embedding.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        threshold: None weights keys by their gates, as in training; a number hides
            keys whose gate is not above it, as in a server.
        values: gates by layer, [B, H, T] float32, written during the pass.
    """

    weights: GateWeights
    rope: Rope
    window: int
    sinks: int = 0
    threshold: float | None = None
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def evaluate(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return and store the gates [B, H, T] of rotated keys [B, H, T, D]."""
        positions = torch.arange(keys.shape[-2], device=keys.device)
        before = self.rope.unrotate(keys, positions)
        self.values[layer] = gate(before, keys, self.weights.layer(layer))
        return self.values[layer]

    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unchanged queries and the gates of the keys."""
        return query, self.evaluate(layer, key)

    def bias(self, known: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the bias on the logits of queries [Q], given gates [..., T]."""
        if self.threshold is None:
            return log_bias(known, self.window, self.sinks, queries)
        return hidden(known > self.threshold, self.window, self.sinks, queries)


def log_bias(
    gates: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return log max(g, 0.001) of gates [..., T] as a bias, see `weighed`."""
    return weighed(gates.clamp(min=LEAST).log(), window, sinks, queries)
