"""Calibrations of random numbers, for tests that need one of the right shape."""

from pathlib import Path
from typing import Any

import torch

from support.made_gates import make_gates
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.calibration import Calibration


def make_calibration(
    kind: str, num_layers: int, num_kv_heads: int, group: int, head_dim: int
) -> Calibration:
    fields = {"kind": kind, "model": "none", "num_layers": num_layers}
    fields |= {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads}
    fields |= {"head_dim": head_dim, "rope_theta": 1e4, "num_tokens": 100}
    generator = torch.Generator().manual_seed(0)
    shapes = Calibration(**fields, tensors={}).shapes
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    return Calibration(**fields, tensors=tensors)


def options_for(
    name: str, folder: Path, num_layers: int, num_kv_heads: int, group: int, size: int
) -> dict[str, Any]:
    """Return the options without which a policy cannot be built.

    Args:
        folder: where to write a calibration file if it needs one.
        num_layers: layers of the events that it is tested with.
    """
    if name.startswith("wgkv"):
        path = folder / "gates.safetensors"
        sizes = num_layers, num_kv_heads, size
        make_gates(*sizes, window=32, rope_theta=1e4).save(path)
        return {"wgkv_gates": str(path)}
    kind = name.rpartition("-")[2]
    key = f"{kind}_calibration"
    if key not in registry.parse(name).options:
        return {}
    path = folder / f"{kind}.safetensors"
    make_calibration(kind, num_layers, num_kv_heads, group, size).save(path)
    return {key: str(path)}
