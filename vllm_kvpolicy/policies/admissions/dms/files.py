"""Reads and writes DMS adapters: our files, and checkpoints of NVIDIA's trainer.

Our files, which train.dms writes, are safetensors with the other fields of `DmsAdapter`
as text in the header. A checkpoint is a folder with the whole model, of which only the
adapter's tensors are read. Neither can run code.

Source: https://github.com/NVIDIA/Model-Optimizer/tree/a2fbac7b/experimental/dms.
Deviations: tensors of checkpoints become float32.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.admissions.dms.adapter import (
    FLAVOURS,
    NAME,
    NAMES,
    DmsAdapter,
    expect,
    full_name,
)

FORMAT = "vllm-kvpolicy dms adapter 1"
VALID = "a file of train.dms, or a checkpoint folder with dms_proj_alpha tensors"
_TENSOR = re.compile(r"model\.layers\.\d{1,6}\.self_attn\.(dms_proj_alpha.*)")
_HEADER: dict[str, Any] = {
    "model": str,
    "flavour": str,
    "num_layers": int,
    "num_kv_heads": int,
    "hidden_size": int,
    "window": int,
    "target_cr": float,
    "kept_fraction": float,
    "alpha_scale": float,
    "alpha_offset": float,
    "shift": int,
}


def save(path: str | Path, adapter: DmsAdapter) -> None:
    """Write a safetensors file; overwrites one that exists."""
    header = {name: getattr(adapter, name) for name in _HEADER}
    model_files.save(path, FORMAT, header, adapter.tensors)


def load(path: str | Path) -> DmsAdapter:
    """Read an adapter: a file of ours, or a checkpoint folder that has one.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    if Path(path).is_dir():
        adapter, per_layer = _load_folder(Path(path))
    else:
        values, tensors = model_files.load(NAME, path, FORMAT, _HEADER, VALID)
        adapter, per_layer = DmsAdapter(**values, tensors=tensors, path=path), False
    _check_fields(adapter)
    missing = sorted(adapter.shapes.keys() - adapter.tensors.keys())
    unknown = sorted(adapter.tensors.keys() - adapter.shapes.keys())
    expect(path, "missing tensors", missing, [])
    expect(path, "unexpected tensors", unknown, [])
    model_files.check_tensors(NAME, path, adapter.tensors, adapter.shapes)
    if per_layer:
        _follow_first_head(adapter)
    return adapter


def _check_fields(adapter: DmsAdapter) -> None:
    """Check the fields that are not tensors."""
    path = adapter.path
    if adapter.flavour not in FLAVOURS:
        expect(path, "flavour", adapter.flavour, " or ".join(FLAVOURS))
    for name in ("num_layers", "num_kv_heads", "hidden_size", "window"):
        if getattr(adapter, name) < 1:
            expect(path, name, getattr(adapter, name), "at least 1")
    if adapter.num_layers > len(adapter.tensors):
        expect(
            path, "num_layers", adapter.num_layers, f"at most {len(adapter.tensors)}"
        )
    if adapter.shift not in (0, 1):
        expect(path, "shift", adapter.shift, "0 or 1")
    if not 1 <= adapter.target_cr < math.inf:
        expect(path, "target_cr", adapter.target_cr, "a number of at least 1")
    if not 0 < adapter.alpha_scale < math.inf:
        expect(path, "alpha_scale", adapter.alpha_scale, "a number above 0")
    if not math.isfinite(adapter.alpha_offset):
        expect(path, "alpha_offset", adapter.alpha_offset, "a number")


def _load_folder(folder: Path) -> tuple[DmsAdapter, bool]:
    """Read a checkpoint; also return whether its first head decides for a layer."""
    config = _read_json(folder / "config.json")
    if not any(key.startswith("dms_") for key in config):
        _refuse(folder, "a config.json without dms_ keys")
    # Keys that are not there mean what they do to the class that wrote the others.
    if not config.get("dms_separate_alpha", False):
        _refuse(
            folder, "a model whose decision is a query channel, which needs no adapter"
        )
    expect(folder, "dms_disable_eviction", config.get("dms_disable_eviction", 0), 0)
    per = config.get("dms_alpha_per", "head")
    if per not in ("head", "layer"):
        expect(folder, "dms_alpha_per", per, "head or layer")
    keys = {
        "flavour": ("model_type", str, None),
        "num_layers": ("num_hidden_layers", int, None),
        "num_kv_heads": ("num_key_value_heads", int, None),
        "hidden_size": ("hidden_size", int, None),
        "window": ("dms_window_size", int, 512),
        "target_cr": ("dms_cr", float, 8),
        "alpha_scale": ("dms_alpha_scale", float, 100.0),
        "alpha_offset": ("dms_initial_alpha_offset", float, 5.0),
    }
    values: dict[str, Any] = {}
    for field, (key, kind, default) in keys.items():
        found = config.get(key, default)
        if kind is float and type(found) is int:
            found = float(found)
        expect(folder, f"type of {key}", type(found).__name__, kind.__name__)
        values[field] = found
    name = config.get("_name_or_path")
    return DmsAdapter(
        **values,
        model=name if isinstance(name, str) else "",
        kept_fraction=math.nan,
        tensors=_read_tensors(folder),
        path=folder,
    ), per == "layer"


def _refuse(path: Path, found: str) -> NoReturn:
    raise ValueError(f"{NAME} {path}: got {found}, expected {VALID}")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        _refuse(path, str(error))
    if not isinstance(content, dict):
        _refuse(path, type(content).__name__)
    return content


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors of all safetensors files, in float32."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in filter(_TENSOR.fullmatch, file.keys()):
                    tensors[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            _refuse(path, str(error))
    if not tensors:
        _refuse(folder, "no such tensor in a .safetensors file")
    biases = [name for name in tensors if name.endswith("dms_proj_alpha.bias")]
    if biases:
        expect(folder, "biases, which no released model has", biases, [])
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point()
        expect(folder, f"{name} is floating point", floating, True)
    return {name: tensor.float() for name, tensor in tensors.items()}


def _follow_first_head(adapter: DmsAdapter) -> None:
    """Give all heads of a layer the weights of its first one."""
    (name,) = (name for name, field in NAMES.items() if field == "projection")
    for layer in range(adapter.num_layers):
        weight = adapter.tensors[full_name(layer, name)]
        weight.copy_(weight[:1].expand_as(weight).clone())
