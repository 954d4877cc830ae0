"""Calibration files: statistics of a model's queries, made before it serves.

`python -m training` writes them: safetensors with the fields of `Calibration` as text
in the header; they cannot run code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.model_files import ModelFile, ModelShape
from vllm_kvpolicy.policies.words import BaseScorer

DESCRIPTION = "the model's query statistics, from `python -m training {}` in a checkout"


@dataclass(frozen=True)
class Calibration(ModelFile):
    """Statistics of a model's queries; sizes are those of `ModelShape`.

    Args:
        kind: "triattention" or "qfilter".
        num_tokens: that the statistics were made from.
    """

    NAME = "calibration"
    FORMAT = "vllm-kvpolicy calibration 1"

    kind: str
    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    num_tokens: int
    tensors: Mapping[str, Tensor]
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


def load(path: str | Path, kind: str) -> Calibration:
    """Read a calibration file of a kind.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    found = Calibration.from_file(path, "a safetensors file")
    found.fits(kind=kind)
    tensors, shapes = found.tensors, found.shapes
    model_files.expect(found.NAME, path, "tensors", sorted(tensors), sorted(shapes))
    model_files.check_tensors(found.NAME, path, tensors, shapes)
    return found


class CalibratedScorer(BaseScorer):
    """A scorer that reads a calibration of `kind` from its option KIND_calibration."""

    fitted = True
    kind: ClassVar[str]
    calibration: Calibration

    @classmethod
    def build(cls, options: Any) -> Self:
        own = dict(options)
        calibration = load(own.pop(f"{cls.kind}_calibration"), cls.kind)
        return cls(calibration, **own)  # type: ignore[arg-type]

    @classmethod
    def check_start(cls, options: Any, kept: Any, vllm_config: Any) -> None:
        key = f"{cls.kind}_calibration"
        with model_files.errors_name(key):
            found = load(getattr(options, key), cls.kind)
            found.fits(**vars(ModelShape.of(vllm_config)))

    def check_model(self, model: ModelShape) -> None:
        self.calibration.fits(**vars(model))
