"""Calibration files: statistics of a model's queries, made before it serves.

`python -m training` writes them: safetensors with the fields of `Calibration` as text
in the header; they cannot run code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.policies import model_files

NAME = "calibration"
DESCRIPTION = "the model's query statistics, from `python -m training {}` in a checkout"
_expect = partial(model_files.expect, NAME)
FORMAT = "vllm-kvpolicy calibration 1"


@dataclass(frozen=True)
class Calibration:
    """Statistics of a model's queries.

    Args:
        kind: "triattention" or "qfilter".
        model: name of the model, as it was given.
        num_layers: L, attention layers.
        num_heads: Hq, query heads per layer.
        num_kv_heads: H, KV heads per layer.
        head_dim: D, channels per head.
        rope_theta: base of the rotary embedding.
        num_tokens: tokens that the statistics were made from.
        tensors: float32 by name, see `shapes`.
        path: where it was read from, for errors.
    """

    kind: str
    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    num_tokens: int
    tensors: Mapping[str, torch.Tensor]
    path: str | Path = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors.

        "triattention": `query_real` and `query_imag` [L, Hq, D/2], mean pre-RoPE query
        with channels f and f + D/2 as one complex number; `query_abs`, the mean of its
        absolute value. "qfilter": `filters` [L, H, D], see `policies.scorers.qfilter`.
        """
        if self.kind == "qfilter":
            return {"filters": (self.num_layers, self.num_kv_heads, self.head_dim)}
        pairs = (self.num_layers, self.num_heads, self.head_dim // 2)
        return dict.fromkeys(("query_real", "query_imag", "query_abs"), pairs)

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that a model has the shape of the calibrated one.

        Raises:
            ValueError: naming the file, the field, and both values.
        """
        _expect(self.path, "num_layers", self.num_layers, num_layers)
        _expect(self.path, "num_heads", self.num_heads, num_heads)
        _expect(self.path, "num_kv_heads", self.num_kv_heads, num_kv_heads)
        _expect(self.path, "head_dim", self.head_dim, head_dim)


# Fields that the header holds, and what turns their text into a value.
HEADER: dict[str, Any] = {
    item.name: item.type
    for item in fields(Calibration)
    if item.type in (str, int, float)
}


def save(path: str | Path, calibration: Calibration) -> None:
    """Write a calibration file; overwrites one that exists."""
    header = {name: getattr(calibration, name) for name in HEADER}
    model_files.save(path, FORMAT, header, calibration.tensors)


def load(path: str | Path, kind: str) -> Calibration:
    """Read a calibration file.

    Args:
        path: the file.
        kind: what it has to hold.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    values, tensors = model_files.load(NAME, path, FORMAT, HEADER, "a safetensors file")
    _expect(path, "kind", values["kind"], kind)
    calibration = Calibration(**values, tensors=tensors, path=path)
    _expect(path, "tensors", sorted(tensors), sorted(calibration.shapes))
    model_files.check_tensors(NAME, path, tensors, calibration.shapes)
    return calibration


def check_file(kind: str, options: Any, vllm_config: Any) -> None:
    """Check, before an engine starts, that a word's calibration fits the model.

    Args:
        kind: what the file has to hold; its option is the kind plus "_calibration".
        options: the word's.
        vllm_config: the finished VllmConfig.

    Raises:
        ValueError: naming the option, the file, and what was found and expected.
    """
    key = f"{kind}_calibration"
    with model_files.errors_name(key):
        found = load(getattr(options, key), kind)
        shape = model_files.ModelShape.of(vllm_config)
        found.check_model(
            shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim
        )
