"""Trains the gates of a model for one sparsity weight; resumes interrupted runs.

Source: WG-KV (arXiv 2512.17452) section 3.4 and appendix;
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py.
Deviations: the learning rate of the first step is not 0; validation comes at the end.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import Parameter

from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.loop import Run
from vllm_kvpolicy.train.rows import Row
from vllm_kvpolicy.train.wgkv.attention import Gating
from vllm_kvpolicy.train.wgkv.losses import distillation, position_weights, sparsity

EXPANSION = {"llama": 4.0, "qwen3": 1.5}  # hidden units per channel of a head


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are the authors'.

    Args:
        sparsity_weight: the paper's lambda.
        window: tokens that every query sees, itself included.
        sinks: first tokens, always kept.
        steps: optimiser steps.
        rows_per_step: sequences per step.
        learning_rate: highest learning rate of AdamW.
        weight_decay: AdamW's.
        warmup: share of the steps in which the learning rate rises.
        expansion: hidden units of a gate per channel of a head; None for the authors'.
        seed: for initial weights and the order of rows.
        data: description of the rows.
    """

    sparsity_weight: float
    window: int = 256
    sinks: int = 0
    steps: int = 7500
    rows_per_step: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    expansion: float | None = None
    seed: int = 42
    data: str = ""


def rate(step: int, steps: int, warmup: float) -> float:
    """Return the factor on the highest learning rate at a step, 0 <= step < steps.

    Linear warm-up over the share `warmup` of the steps, then a cosine decay. Of 100
    steps with a warm-up of 0.1, step 0 has 1/11, step 10 has 1 and step 55 has 0.5.
    """
    rising = round(steps * warmup)
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / (steps - rising))


def new_gates(base: Base, settings: Settings) -> GateWeights:
    """Return untrained gates, whose values are about 0.5.

    Norm weights are 1, the others uniform in +-1 / sqrt(inputs), as torch initialises
    grouped convolutions.
    """
    expansion = settings.expansion or EXPANSION[base.flavour]
    layers, heads, channels = base.num_layers, base.num_kv_heads, base.head_dim
    units = round(expansion * channels)
    generator = torch.Generator().manual_seed(settings.seed)

    def uniform(inputs: int, *shape: int) -> torch.Tensor:
        drawn = torch.rand(layers, heads, *shape, generator=generator)
        return Parameter(((2 * drawn - 1) * inputs**-0.5).to(base.device))

    def ones() -> torch.Tensor:
        return Parameter(torch.ones(layers, channels, device=base.device))

    return GateWeights(
        pre_norm=ones(),
        post_norm=ones(),
        first=uniform(2 * channels, units, 2 * channels),
        first_bias=uniform(2 * channels, units),
        second=uniform(units, units),
        second_bias=uniform(units),
    )


def train(
    base: Base,
    rows: Iterator[Row],
    settings: Settings,
    state: Path,
    save_steps: int = 100,
) -> GateWeights:
    """Train gates to the end, starting from the state file if there is one.

    Args:
        base: the frozen model.
        rows: in the same order each time; see `Run.take`.
        settings: settings of the run.
        state: state file; kept when the run is done.
        save_steps: steps between two saves.

    Raises:
        ValueError: see `Run.take`.
    """
    weights = new_gates(base, settings)
    tensors = weights.tensors()
    optimizer = torch.optim.AdamW(
        list(tensors.values()), weight_decay=settings.weight_decay
    )

    def losses(step: int, index: int, row: Row) -> dict[str, torch.Tensor]:
        return _losses(base, settings, weights, row)

    def begin(step: int) -> float:
        return settings.learning_rate * rate(step, settings.steps, settings.warmup)

    name = f"lambda {settings.sparsity_weight:g}"
    run = Run(name, settings, tensors, losses, optimizer, begin, state, save_steps)
    run.take(rows)
    return weights


def _losses(
    base: Base, settings: Settings, weights: GateWeights, row: Row
) -> dict[str, torch.Tensor]:
    """Return the loss of one row and its distillation loss."""
    with torch.no_grad():
        teacher = base.hidden(row.ids)
    gating = Gating(weights, base.rope, settings.window, settings.sinks)
    distilled = distillation(base.hidden(row.ids, gating), teacher, row.counts)
    gates = torch.stack(list(gating.values.values()))
    ruled = position_weights(len(row), settings.window, settings.sinks)
    loss = distilled + settings.sparsity_weight * sparsity(gates, ruled)
    return {"loss": loss, "distillation": distilled}
