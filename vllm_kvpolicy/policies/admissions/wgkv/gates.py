"""Write gates: a small network per layer and KV head that admits tokens.

Source: names and shapes as the weights at https://huggingface.co/WG-KV/checkpoints have
them. Deviations: none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_kvpolicy.policies import model_files

NAME = "wgkv gates"
expect = partial(model_files.expect, NAME)
FLAVOURS = ("llama", "qwen3")  # model types; the gate of qwen3 reads normalised keys
# Hidden units of released gates, in head sizes.
RELEASED_UNITS = {"llama": 4, "qwen3": 1.5}
# Names in a file, and of the fields of `kernels.wgkv_gate.GateWeights`.
NAMES = {
    "pre_key_norm.weight": "pre_norm",
    "post_key_norm.weight": "post_norm",
    "conv1.weight": "first",
    "conv1.bias": "first_bias",
    "conv2.weight": "second",
    "conv2.bias": "second_bias",
}


def full_name(layer: int, name: str) -> str:
    """Return the name of a tensor of `NAMES` in a file."""
    return f"model.layers.{layer}.self_attn.g_predictors.{name}"


@dataclass(frozen=True)
class Gates:
    """The gates of a model, and what they were trained for.

    Args:
        model: name of the model, as it was given; "" where a file does not say.
        flavour: one of `FLAVOURS`, or "" where a file does not say.
        num_layers: L.
        num_kv_heads: H, KV heads per layer.
        head_dim: D, channels per head.
        rope_theta: base of the rotary embedding; NaN where a file does not say.
        window: tokens that are always seen, the querying one included.
        threshold: tokens with a gate above this are kept (the paper's tau).
        sinks: first tokens that are kept in any case.
        sparsity_weight: the paper's lambda; NaN where a file does not say.
        kept_fraction: kept share of the tokens that were looked at after training, of
            all layers and heads; NaN where a file does not say.
        tensors: float32 by name, see `shapes`.
        path: where it was read from, for errors.
    """

    model: str
    flavour: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    window: int
    threshold: float
    sinks: int
    sparsity_weight: float
    kept_fraction: float
    tensors: Mapping[str, torch.Tensor]
    path: str | Path = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors: as the first bias says, M units per head."""
        heads, channels = self.num_kv_heads, self.head_dim
        first_bias = self.tensors.get(full_name(0, "conv1.bias"), torch.empty(0))
        units = max(1, first_bias.numel() // heads)
        shapes = (
            (channels,),
            (channels,),
            (heads * units, 2 * channels, 1),
            (heads * units,),
            (heads, units, 1),
            (heads,),
        )
        return {
            full_name(layer, name): shape
            for layer in range(self.num_layers)
            for name, shape in zip(NAMES, shapes, strict=True)
        }

    def check_model(
        self,
        flavour: str,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope_theta: float,
    ) -> None:
        """Check that the gates were trained for a model of this kind and shape.

        Raises:
            ValueError: naming the file, the field, and both values.
        """
        self.check_shape(num_layers, num_kv_heads, head_dim)
        if self.flavour:
            expect(self.path, "flavour", self.flavour, flavour)
        elif flavour in RELEASED_UNITS:
            units = self.shapes[full_name(0, "conv2.weight")][1]
            wanted = int(RELEASED_UNITS[flavour] * head_dim)
            expect(self.path, f"hidden units for {flavour}", units, wanted)
        if not math.isnan(self.rope_theta):
            expect(self.path, "rope_theta", self.rope_theta, rope_theta)

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Check the sizes, which every file holds.

        Raises:
            ValueError: naming the file, the field, and both values.
        """
        expect(self.path, "num_layers", self.num_layers, num_layers)
        expect(self.path, "num_kv_heads", self.num_kv_heads, num_kv_heads)
        expect(self.path, "head_dim", self.head_dim, head_dim)

    def stacked(self) -> dict[str, torch.Tensor]:
        """Return the fields of `kernels.wgkv_gate.GateWeights`, with a leading L."""
        heads, channels = self.num_kv_heads, self.head_dim
        shapes = {
            "first": (self.num_layers, heads, -1, 2 * channels),
            "first_bias": (self.num_layers, heads, -1),
            "second": (self.num_layers, heads, -1),
        }
        layers = range(self.num_layers)
        whole = {
            field: torch.stack([self.tensors[full_name(i, name)] for i in layers])
            for name, field in NAMES.items()
        }
        return {
            field: tensor.view(shapes.get(field, tensor.shape))
            for field, tensor in whole.items()
        }


def unstacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; the inverse of `Gates.stacked`."""
    num_layers, num_heads, num_units, channels = weights["first"].shape
    shapes = {
        "first": (num_layers, num_heads * num_units, channels, 1),
        "first_bias": (num_layers, num_heads * num_units),
        "second": (num_layers, num_heads, num_units, 1),
    }
    return {
        full_name(layer, name): tensor[layer]
        .detach()
        .to("cpu", torch.float32)
        .contiguous()
        for name, field in NAMES.items()
        for tensor in [weights[field].reshape(shapes.get(field, weights[field].shape))]
        for layer in range(num_layers)
    }
