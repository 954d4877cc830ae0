"""Surrogates of KVzap: a small network per layer that scores tokens for each KV head.

Source: KVzap (arXiv 2601.07891); names and sizes as `KVzapConfig` and `KVzapModel` in
`presses/kvzap_press.py` of kvpress 0.5.5 have them. Deviations: none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.chunks import few_sizes
from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.ranks import HeadShard

NAME = "kvzap surrogate"
expect = partial(model_files.expect, NAME)


@dataclass(frozen=True)
class Surrogate:
    """The surrogate of a model. Files do not name the model.

    Args:
        num_layers: L, `n_modules` of config.json.
        hidden_size: d, what the attention of a layer is given per token; `input_dim`.
        num_kv_heads: H, KV heads per layer; `output_dim`.
        num_units: M, hidden units per layer, `hidden_dim`; None for a linear surrogate.
        tensors: float32 by name, see `shapes`.
        path: where it was read from, for errors.
    """

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    num_units: int | None
    tensors: Mapping[str, torch.Tensor]
    path: str | Path = ""

    @property
    def _names(self) -> tuple[str, ...]:
        """What the names of the linear layers end in, `layers.I` before them."""
        return ("",) if self.num_units is None else (".0", ".2")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors.

        `layers.I.weight` [H, d] and `layers.I.bias` [H]; with hidden units
        `layers.I.0.weight` [M, d], `layers.I.0.bias` [M], `layers.I.2.weight` [H, M]
        and `layers.I.2.bias` [H].
        """
        units = () if self.num_units is None else (self.num_units,)
        sizes = (self.hidden_size, *units, self.num_kv_heads)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_layers):
            for name, before, after in zip(
                self._names, sizes[:-1], sizes[1:], strict=True
            ):
                shapes[f"layers.{layer}{name}.weight"] = (after, before)
                shapes[f"layers.{layer}{name}.bias"] = (after,)
        return shapes

    def linears(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return weight and bias of a layer's linear layers, first to last."""
        names = [f"layers.{layer}{name}" for name in self._names]
        return [
            (self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
            for name in names
        ]

    def of_heads(self, shard: HeadShard) -> "Surrogate":
        """Return the surrogate that scores for a rank's KV heads alone."""
        cut = {
            f"layers.{layer}{self._names[-1]}.{part}"
            for layer in range(self.num_layers)
            for part in ("weight", "bias")
        }
        tensors = {
            name: shard.kv_heads(tensor, 0) if name in cut else tensor
            for name, tensor in self.tensors.items()
        }
        heads = len(tensors[f"layers.0{self._names[-1]}.bias"])
        return replace(self, num_kv_heads=heads, tensors=tensors)

    def check_heads(self, num_layers: int, num_kv_heads: int) -> None:
        """Check that the surrogate was trained for a model of so many heads.

        Raises:
            ValueError: naming the folder, the key of config.json, and both values.
        """
        expect(self.path, "n_modules", self.num_layers, num_layers)
        expect(self.path, "output_dim", self.num_kv_heads, num_kv_heads)

    def check_model(self, num_layers: int, num_kv_heads: int, hidden_size: int) -> None:
        """Check that the surrogate was trained for a model of this shape.

        Raises:
            ValueError: naming the folder, the key of config.json, and both values.
        """
        self.check_heads(num_layers, num_kv_heads)
        expect(self.path, "input_dim", self.hidden_size, hidden_size)


def surrogate_scores(
    hidden: torch.Tensor, linears: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Score tokens for every KV head of a layer.

    Args:
        hidden: [..., T, d] floating point, what the layer's attention is given, behind
            the input norm.
        linears: weight [out, in] and bias [out] of each linear layer, in the dtype of
            `hidden`, with an exact GELU between two of them; the last has H outputs.

    Returns:
        [..., T, H] float32, estimated logarithms of the KVzip+ scores.
    """
    rows = few_sizes(hidden)
    for number, (weight, bias) in enumerate(linears):
        rows = F.linear(F.gelu(rows) if number else rows, weight, bias)
    return rows[..., : hidden.shape[-2], :].float()
