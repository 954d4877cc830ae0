"""One pass through a model whose older keys weigh as much as their gates say.

Source: WG-KV (arXiv 2512.17452) section 3.4. Deviations: gates are evaluated in
float32, on keys whose rotation is undone, as they are when a model is served.
"""

from dataclasses import dataclass, field

import torch

from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate
from vllm_kvpolicy.train.attention import Student, hidden, weighed

LEAST = 1e-3  # smallest gate in a logarithm; none has a gradient below


@dataclass
class Gating(Student):
    """How one pass through a model is gated, and the gates that it came to.

    Args:
        weights: gates of all layers.
        rope: how the model rotates.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        threshold: None to weigh keys by their gates; a number to hide those whose
            gate is not above it, as a server does.
        values: gates by layer, [B, H, T] float32, written in the pass.
    """

    weights: GateWeights
    rope: Rope
    window: int
    sinks: int = 0
    threshold: float | None = None
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def evaluate(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return and note the gates [B, H, T] of cached keys [B, H, T, D]."""
        positions = torch.arange(keys.shape[-2], device=keys.device)
        before = self.rope.unrotate(keys, positions)
        self.values[layer] = gate(before, keys, self.weights.layer(layer))
        return self.values[layer]

    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries as they are, and the gates of the keys."""
        return query, self.evaluate(layer, key)

    def bias(self, known: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits of queries [Q], by gates [..., T]."""
        if self.threshold is None:
            return log_bias(known, self.window, self.sinks, queries)
        return hidden(known > self.threshold, self.window, self.sinks, queries)


def log_bias(
    gates: torch.Tensor, window: int, sinks: int, queries: torch.Tensor
) -> torch.Tensor:
    """Return log max(g, 0.001) of gates [..., T] as a bias, see `weighed`."""
    return weighed(gates.clamp(min=LEAST).log(), window, sinks, queries)
