"""The decision of DMS: whether a token and KV head may drop the token before it.

Source: DMS (arXiv 2506.05345) section 3; with layers of its own, https://github.com/
NVIDIA/Model-Optimizer/tree/a2fbac7b/experimental/dms. Deviations: logits are float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import few_sizes


@dataclass(frozen=True)
class DecisionWeights:
    """The adapter of one layer, or with a leading L those of L layers.

    Both tensors have one dtype, in which it is evaluated.

    Args:
        norm: [d], weight of the norm of the residual stream.
        projection: [H, d], from there to one number per KV head.
    """

    norm: Tensor
    projection: Tensor

    def layer(self, index: int) -> "DecisionWeights":
        """Return views of one layer's adapter."""
        return DecisionWeights(self.norm[index], self.projection[index])


def decision_logits(
    hidden: Tensor,
    weights: DecisionWeights,
    epsilon: float,
    scale: float,
    offset: float,
) -> Tensor:
    """Evaluate an adapter; above 0 the token that is decided on is dropped.

    Args:
        hidden: [..., T, d] floating point, the residual stream in front of the layer's
            input norm.
        weights: of the layer.
        epsilon: added to mean squares, the model's `rms_norm_eps`.
        scale: factor on the projection's output.
        offset: subtracted from that.

    Returns:
        [..., T, H] float32.
    """
    wide = few_sizes(hidden).float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    normalised = unit.to(weights.norm.dtype) * weights.norm
    logits = (normalised @ weights.projection.T)[..., : hidden.shape[-2], :]
    return logits.float() * scale - offset
