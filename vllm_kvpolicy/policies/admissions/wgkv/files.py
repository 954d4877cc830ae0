"""Reads and writes WG-KV gates: the authors' released files, and ours.

Written by `train.wgkv`.

Both kinds name their tensors as the authors do. Theirs, `.pt`, hold nothing else. Ours
are safetensors with the other fields of `Gates` as text in the header. Nothing in
either can run.

Source: the files at https://huggingface.co/WG-KV/checkpoints, which
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py writes.
Deviations: none.
"""

import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.admissions.wgkv.gates import (
    FLAVOURS,
    NAME,
    Gates,
    expect,
    full_name,
)

FORMAT = "vllm-kvpolicy wgkv gates 1"
WINDOW, THRESHOLD = 256, 0.1  # of all released gates
_NAME = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.g_predictors\..+")
_HEADER: dict[str, Any] = {
    "model": str,
    "flavour": str,
    "num_layers": int,
    "num_kv_heads": int,
    "head_dim": int,
    "rope_theta": float,
    "window": int,
    "threshold": float,
    "sinks": int,
    "sparsity_weight": float,
    "kept_fraction": float,
}


def save(path: str | Path, gates: Gates) -> None:
    """Write a safetensors file; overwrites one that exists."""
    header = {name: getattr(gates, name) for name in _HEADER}
    model_files.save(path, FORMAT, header, gates.tensors)


def load(path: str | Path) -> Gates:
    """Read a gate file: `.pt` as the authors released them, else one of ours.

    A released file says neither window nor threshold: it gets those of the paper, which
    `dataclasses.replace` changes.

    Raises:
        ValueError: naming the file, the key, and what was found and expected there.
    """
    gates = (
        _load_released(path) if Path(path).suffix.lower() == ".pt" else _load_ours(path)
    )
    if gates.num_layers > len(gates.tensors):
        expect(path, "num_layers", gates.num_layers, f"at most {len(gates.tensors)}")
    missing = sorted(gates.shapes.keys() - gates.tensors.keys())
    unknown = sorted(gates.tensors.keys() - gates.shapes.keys())
    expect(path, "missing tensors", missing, [])
    expect(path, "unexpected tensors", unknown, [])
    model_files.check_tensors(NAME, path, gates.tensors, gates.shapes)
    return gates


def _load_ours(path: str | Path) -> Gates:
    """Read a file that `save` wrote; does not check its tensors."""
    valid = "a safetensors file, or a .pt file released by the authors"
    values, tensors = model_files.load(NAME, path, FORMAT, _HEADER, valid)
    gates = Gates(**values, tensors=tensors, path=path)
    if gates.flavour not in FLAVOURS:
        expect(path, "flavour", gates.flavour, " or ".join(FLAVOURS))
    for name in ("num_layers", "num_kv_heads", "head_dim", "window"):
        if values[name] < 1:
            expect(path, name, values[name], "at least 1")
    if gates.sinks < 0:
        expect(path, "sinks", gates.sinks, "at least 0")
    if not 0 <= gates.threshold < 1:
        expect(path, "threshold", gates.threshold, "a number from 0 to below 1")
    if not gates.rope_theta > 0:
        expect(path, "rope_theta", gates.rope_theta, "a number above 0")
    return gates


def _load_released(path: str | Path) -> Gates:
    """Read a file of the authors; fields that it leaves out are the paper's."""
    tensors = _read_pickle(path)
    matches = [_NAME.fullmatch(name) for name in tensors]
    # Counted, since a name could hold any number.
    num_layers = len({int(match[1]) for match in matches if match})
    head_dim = _only_size(path, tensors, full_name(0, "pre_key_norm.weight"))
    num_kv_heads = _only_size(path, tensors, full_name(0, "conv2.bias"))
    return Gates(
        model="",
        flavour="",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=math.nan,
        window=WINDOW,
        threshold=THRESHOLD,
        sinks=0,
        sparsity_weight=math.nan,
        kept_fraction=math.nan,
        tensors=tensors,
        path=path,
    )


def _only_size(path: str | Path, tensors: Mapping[str, torch.Tensor], name: str) -> int:
    """Return the size of a tensor that has to have one dimension."""
    if name not in tensors:
        expect(path, "tensors", sorted(tensors)[:8], f"{name} among them")
    shape = list(tensors[name].shape)
    if len(shape) != 1 or not shape[0]:
        expect(path, f"shape of {name}", shape, "one size above 0")
    return shape[0]


def _read_pickle(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the flat dict of tensors that a file holds, in float32.

    The unpickler makes tensors, numbers and plain containers only.
    """
    expected = "a dict of tensors written by torch.save"
    if not Path(path).is_file() or not zipfile.is_zipfile(path):
        kind = "a different kind of file" if Path(path).is_file() else "no file"
        raise ValueError(f"{NAME} {path}: got {kind}, expected {expected}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch has no one error for what a broken file causes
        # Its own words advise to load such a file in a way that runs what is in it.
        raise ValueError(
            f"{NAME} {path}: got content that cannot be read safely, expected "
            f"{expected}"
        ) from None
    if not isinstance(content, dict) or not content:
        expect(path, "content", type(content).__name__, expected)
    for name, value in content.items():
        expect(path, f"name {name!r} is text", isinstance(name, str), True)
        expect(path, f"{name} is a tensor", isinstance(value, torch.Tensor), True)
        expect(path, f"layout of {name}", value.layout, torch.strided)
        expect(path, f"{name} is floating point", value.is_floating_point(), True)
    return {name: value.detach().float() for name, value in content.items()}
