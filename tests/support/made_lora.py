"""Random LoRA adapters of the tiny model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 4


def write_lora(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter, as PEFT does, of every projection in a model's layers.

    Args:
        folder: to write into; made if it is not there.
        model: folder of `make_tiny_model`.
        seed: of the weights, which are large enough to change greedy answers at once.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    paths = [key for key in weights if key.endswith("_proj.weight")]
    tensors = {}
    for path in paths:
        rows, columns = weights[path].shape
        prefix = f"base_model.model.{path.removesuffix('.weight')}.lora_"
        down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
        tensors[f"{prefix}A.weight"] = down
        tensors[f"{prefix}B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK // 2,
        "target_modules": sorted({path.split(".")[-2] for path in paths}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
