"""The teacher and the student of a DMS run.

Source: DMS (arXiv 2506.05345) section 3.2 and appendix B; https://github.com/NVIDIA/
Model-Optimizer/tree/a2fbac7b/experimental/dms. Deviations: the weights that produce
borrowed channels are set to 0 when these have faded, so that decisions start from
-offset.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from vllm_kvpolicy.kernels.dms_decision import DecisionWeights
from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.dms.attention import Dropping
from vllm_kvpolicy.train.dms.settings import Settings


@dataclass(frozen=True)
class Retrofit:
    """A teacher, a student, and the adapter if there is one.

    Args:
        settings: settings of the run.
        teacher: the original model.
        student: the same object with an adapter, a copy with borrowed channels.
        weights: the adapter of all layers, float32; None where channels are borrowed.
    """

    settings: Settings
    teacher: Base
    student: Base
    weights: DecisionWeights | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors by name."""
        if self.weights is None:
            return dict(self.student.model.named_parameters())
        return {"norm": self.weights.norm, "projection": self.weights.projection}

    def dropping(self, **how: Any) -> Dropping:
        """Return a student's pass; `how` has fields of `Dropping`."""
        base = self.student
        return Dropping(self.settings, base.rope, base.epsilon, self.weights, **how)

    @torch.no_grad()
    def clear_channels(self) -> None:
        """Set the weights that produce borrowed channels to 0."""
        for layer in self.student.decoder.layers:
            projection, size = layer.self_attn.q_proj, self.student.head_dim
            heads = projection.out_features // size
            group = heads // self.student.num_kv_heads
            projection.weight.view(heads, size, -1)[::group, -1] = 0
            if projection.bias is not None:
                projection.bias.view(heads, size)[::group, -1] = 0


def new_adapter(base: Base) -> DecisionWeights:
    """Return an adapter that drops nothing: projections are 0, norm weights 1."""
    layers, size, device = base.num_layers, base.hidden_size, base.device
    projection = torch.zeros(layers, base.num_kv_heads, size, device=device)
    norm = torch.ones(layers, size, device=device)
    return DecisionWeights(Parameter(norm), Parameter(projection))
