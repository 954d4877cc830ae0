"""Reads the surrogates of KVzap: one small network per layer.

A surrogate is a folder as NVIDIA releases them on the hub: config.json with the sizes,
and model.safetensors. Neither can run code.

Source: `KVzapConfig` and `KVzapModel` in `presses/kvzap_press.py` of kvpress 0.5.5.
Deviations: tensors become float32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from vllm_kvpolicy.policies import model_files

NAME = "kvzap surrogate"
expect = partial(model_files.expect, NAME)
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
VALID = (
    f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a name on the hub that `hf "
    "download NAME` has brought to this machine"
)
MODEL_TYPE = "kvzap"
SIZES = ("n_modules", "input_dim", "output_dim")  # and hidden_dim, which may be null


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


def load(name: str | Path) -> Surrogate:
    """Read a surrogate from a folder, or from what has been downloaded from the hub.

    Args:
        name: a folder, or a name on the hub such as nvidia/KVzap-mlp-Qwen3-8B.

    Raises:
        ValueError: naming the folder, the key, and what was found and expected there.
    """
    folder = _folder(name)
    config = _read_config(folder / CONFIG_FILE)
    expect(folder, "model_type", config.get("model_type"), MODEL_TYPE)
    units = config.get("hidden_dim")
    sizes = {key: config.get(key) for key in SIZES}
    for key, size in {**sizes, "hidden_dim": 1 if units is None else units}.items():
        if type(size) is not int or size < 1:
            expect(folder, key, size, "an integer of at least 1")
    _, found = model_files.read(NAME, folder / WEIGHTS_FILE, VALID)
    for tensor_name, tensor in found.items():
        floating = tensor.is_floating_point()
        expect(folder, f"{tensor_name} is floating point", floating, True)
    surrogate = Surrogate(
        num_layers=config["n_modules"],
        hidden_size=config["input_dim"],
        num_kv_heads=config["output_dim"],
        num_units=units,
        tensors={key: tensor.float() for key, tensor in found.items()},
        path=folder,
    )
    if surrogate.num_layers > len(found):
        expect(folder, "n_modules", surrogate.num_layers, f"at most {len(found)}")
    shapes = surrogate.shapes
    expect(folder, "missing tensors", sorted(shapes.keys() - found.keys()), [])
    expect(folder, "unexpected tensors", sorted(found.keys() - shapes.keys()), [])
    model_files.check_tensors(NAME, folder, surrogate.tensors, shapes)
    return surrogate


def _folder(name: str | Path) -> Path:
    """Return the folder that a name means; uses the local cache of the hub only."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ValueError(f"{NAME} {name}: got no folder, expected {VALID}") from None


def _read_config(path: Path) -> dict[str, Any]:
    """Return the object that config.json holds."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{NAME} {path}: got {error}, expected {VALID}") from None
    if not isinstance(content, dict):
        expect(path, "content", type(content).__name__, "an object")
    return content
