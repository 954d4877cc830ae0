"""DMS adapters: a small projection per layer that decides which tokens to drop.

Source: names and shapes as the checkpoints of
https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7b/experimental/dms have them.
Deviations: none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_kvpolicy.policies import model_files

NAME = "dms adapter"
expect = partial(model_files.expect, NAME)
# Model types, and vLLM's classes of such models.
FLAVOURS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Names in a file, and of the fields of `kernels.dms_decision.DecisionWeights`.
NAMES = {
    "dms_proj_alpha_norm.weight": "norm",
    "dms_proj_alpha.weight": "projection",
}


def full_name(layer: int, name: str) -> str:
    """Return the name of a tensor of `NAMES` in a file."""
    return f"model.layers.{layer}.self_attn.{name}"


@dataclass(frozen=True)
class DmsAdapter:
    """The adapter of a model, and what it was trained for.

    It reads the residual stream h before each layer's input norm and decides for each
    token and KV head whether to drop a token: where alpha_scale * projection(RMSNorm(h,
    norm)) - alpha_offset is above 0. The norm's epsilon is the model's `rms_norm_eps`.

    Args:
        model: name of the model, as it was given; "" where a file does not say.
        flavour: type of the model, one of `FLAVOURS`.
        num_layers: L.
        num_kv_heads: H, KV heads per layer.
        hidden_size: d, channels of the residual stream.
        window: W; query i sees key j where i - j <= W, W + 1 keys with itself.
        alpha_scale: factor on the projection's output.
        alpha_offset: subtracted from that.
        shift: the token at t decides on the one at t - shift.
        target_cr: tokens per token kept that it was trained for.
        kept_fraction: kept share of the tokens that were evaluated after training, of
            all layers and heads; NaN where a file does not say.
        tensors: float32 by name, see `shapes`.
        path: where it was read from, for errors.
    """

    model: str
    flavour: str
    num_layers: int
    num_kv_heads: int
    hidden_size: int
    window: int
    target_cr: float
    kept_fraction: float
    tensors: Mapping[str, torch.Tensor]
    alpha_scale: float = 100.0
    alpha_offset: float = 5.0
    shift: int = 1
    path: str | Path = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors: norms [d], projections [H, d]."""
        size = self.hidden_size
        shapes = ((size,), (self.num_kv_heads, size))
        return {
            full_name(layer, name): shape
            for layer in range(self.num_layers)
            for name, shape in zip(NAMES, shapes, strict=True)
        }

    def check_model(
        self, flavour: str, num_layers: int, num_kv_heads: int, hidden_size: int
    ) -> None:
        """Check that the adapter was trained for a model of this kind and shape.

        Raises:
            ValueError: naming the file, the field, and both values.
        """
        expect(self.path, "flavour", self.flavour, flavour)
        expect(self.path, "num_layers", self.num_layers, num_layers)
        expect(self.path, "num_kv_heads", self.num_kv_heads, num_kv_heads)
        expect(self.path, "hidden_size", self.hidden_size, hidden_size)

    def stacked(self) -> dict[str, torch.Tensor]:
        """Return `norm` [L, d] and `projection` [L, H, d], float32."""
        layers = range(self.num_layers)
        return {
            field: torch.stack([self.tensors[full_name(i, name)] for i in layers])
            for name, field in NAMES.items()
        }


def unstacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; the inverse of `DmsAdapter.stacked`."""
    return {
        full_name(layer, name): tensor.detach().to("cpu", torch.float32).contiguous()
        for name, field in NAMES.items()
        for layer, tensor in enumerate(weights[field])
    }
