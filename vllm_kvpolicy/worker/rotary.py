"""Reads a model's rotary frequencies from the table that it rotates with."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from vllm_kvpolicy.kernels.rope import Rope

# Models with sliding windows whose layers of full attention rotate queries and keys, as
# their code in vLLM says. Others may have a rotary embedding there and leave it out.
ROTATING = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})


def check_rotates(architectures: Iterable[str]) -> None:
    """Refuse a model with sliding windows of which is not known whether it rotates.

    Raises:
        ValueError: it is not among ROTATING.
    """
    if not ROTATING & {*architectures}:
        known, given = ", ".join(sorted(ROTATING)), ", ".join(architectures)
        raise ValueError(
            "rotary positions: with sliding windows, expected a model whose layers of "
            f"full attention are known to use RoPE ({known}), got {given}"
        )


def model_rope(
    model: torch.nn.Module, head_dim: int, layers: Iterable[str] | None = None
) -> Rope:
    """Return the rotary embedding that layers of a model use.

    Args:
        model: the loaded model.
        head_dim: D.
        layers: names of attention layers, whose embedding is beside them; None for all.

    Raises:
        ValueError: there is none, layers differ, or it is of a kind that policies do
            not support: interleaved pairs of channels, or only a part of each head.
    """
    parents = None if layers is None else {name.rpartition(".")[0] for name in layers}
    modules = [
        module
        for name, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "cos_sin_cache")
        and (parents is None or name.rpartition(".")[0] in parents)
    ]
    if not modules:
        raise ValueError(
            "rotary positions: got a model without RoPE, expected one with RoPE"
        )
    first = modules[0]
    for module in modules:
        if not torch.equal(module.cos_sin_cache, first.cos_sin_cache):
            raise ValueError("rotary positions: expected the same RoPE in all layers")
    if not getattr(first, "is_neox_style", False):
        raise ValueError(
            "rotary positions: expected the half (NeoX) layout, got interleaved pairs"
        )
    if _width(first) != head_dim:
        raise ValueError(
            f"rotary positions: expected RoPE over whole heads, got {_width(first)} "
            f"of {head_dim} channels"
        )
    return rope_of_table(first.cos_sin_cache)


def _width(module: Any) -> int:
    return module.cos_sin_cache.shape[-1]


def rope_of_table(table: torch.Tensor) -> Rope:
    """Recover frequencies from cosines and sines at positions 0, 1, 2...

    The angle at position 1 gives a first estimate. Each doubling of the position, whose
    full turns follow from the estimate, halves its error.

    Args:
        table: [positions, D] floating point, D/2 cosines, then D/2 sines.
    """
    cos, sin = table.double().chunk(2, dim=-1)
    scaling = float(torch.hypot(cos[0], sin[0]).mean())
    angles = torch.atan2(sin, cos)
    frequency, position = angles[1], 2
    while position < len(table):
        turns = ((frequency * position - angles[position]) / math.tau).round()
        frequency = (angles[position] + turns * math.tau) / position
        position *= 2
    return Rope(frequency, scaling)
