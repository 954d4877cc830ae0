"""Random surrogates of KVzap in the shape of the released folders, for tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CENTRE = -4.0  # of the scores that surrogates of random weights give


def surrogate_config(
    layers: int, heads: int, hidden: int, units: int | None
) -> dict[str, object]:
    """Return a config.json as kvpress 0.5.5 saves it with transformers 5.19."""
    config = {"architectures": ["KVzapModel"], "dtype": "bfloat16", "hidden_dim": units}
    config |= {"input_dim": hidden, "model_type": "kvzap", "n_modules": layers}
    config |= {"output_dim": heads, "transformers_version": "5.19.0"}
    return config


def surrogate_tensors(
    layers: int, heads: int, hidden: int, units: int | None
) -> dict[str, torch.Tensor]:
    """Return random float32 weights; scores of about half of all tokens are below -4.

    Args:
        layers: L.
        heads: H, KV heads per layer.
        hidden: d, width of the hidden states.
        units: hidden units per layer, None for a linear surrogate.
    """
    generator = torch.Generator().manual_seed(3)
    steps = [("", hidden, heads)]
    if units is not None:
        steps = [(".0", hidden, units), (".2", units, heads)]
    tensors = {}
    for layer in range(layers):
        for name, before, after in steps:
            weight = torch.randn(after, before, generator=generator) * before**-0.5
            bias = torch.randn(after, generator=generator) * 0.3
            tensors[f"layers.{layer}{name}.weight"] = weight
            tensors[f"layers.{layer}{name}.bias"] = bias
        tensors[f"layers.{layer}{steps[-1][0]}.bias"] += CENTRE
    return tensors


def write_surrogate(
    folder: Path, layers: int, heads: int, hidden: int, units: int | None
) -> Path:
    """Write a surrogate; see `surrogate_tensors`. Return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = layers, heads, hidden, units
    (folder / "config.json").write_text(json.dumps(surrogate_config(*sizes)))
    save_file(surrogate_tensors(*sizes), folder / "model.safetensors", {"format": "pt"})
    return folder
