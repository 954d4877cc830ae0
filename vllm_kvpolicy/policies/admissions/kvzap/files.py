"""Reads surrogates of KVzap.

A surrogate is a folder as NVIDIA releases them on the hub: config.json with the sizes,
and model.safetensors. Neither can run code.

Source: `KVzapConfig` and `KVzapModel` in `presses/kvzap_press.py` of kvpress 0.5.5.
Deviations: tensors become float32.
"""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from vllm_kvpolicy.policies import model_files
from vllm_kvpolicy.policies.admissions.kvzap.surrogate import NAME, Surrogate, expect

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
VALID = (
    f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a name on the hub that `hf "
    "download NAME` has brought to this machine"
)
MODEL_TYPE = "kvzap"
SIZES = ("n_modules", "input_dim", "output_dim")  # and hidden_dim, which may be null


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
