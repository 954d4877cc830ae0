"""Finds the parts of a loaded model that hooks are attached to."""

from collections.abc import Sequence

from torch import nn


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Find a model's decoder layers: the one list of `num_layers` called "layers".

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] == "layers"
        and len(module) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: expected exactly one list 'layers' of "
            f"{num_layers} decoder layers, found {len(found)}"
        )
    return found[0]


def attention_modules(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the module around each attention layer: projections, norms, rotation.

    Args:
        model: the loaded model.
        layers: vLLM's attention layers in model order.

    Raises:
        ValueError: one of them is not an `attn` of a module.
    """
    parents = {
        id(module.attn): module
        for module in model.modules()
        if isinstance(getattr(module, "attn", None), nn.Module)
    }
    missing = sum(id(layer) not in parents for layer in layers)
    if missing:
        raise ValueError(
            f"{type(model).__name__}: expected each attention layer to be the "
            f"`attn` of a module with its projections, found {missing} that are not"
        )
    return [parents[id(layer)] for layer in layers]
