"""Owns the presets: model shape, final sizes and training settings, by name."""

from collections.abc import Mapping
from dataclasses import dataclass


def longer(family: str, lines: int) -> int:
    """Returns a held-out difficulty: a quarter more lines, as far as names go."""
    return min(lines * 5 // 4, 240 if family == "recall" else 120)


@dataclass(frozen=True)
class Preset:
    """One size of the reasoner and how it is trained.

    Attributes:
        stored: dtype of the exported weights.
        largest: final size of each family in training, in lines.
        max_position: positions that gaps between lines may reach in training.
        steps: optimiser steps of a whole run.
        decay: steps over which the learning rate falls to 0 at the end.
        first_tokens: tokens of the first step.
        step_tokens: tokens of a step after ``grow_steps``.
        grow_steps: steps over which the tokens of a step grow.
        processes: training processes on a CPU, one core each.
    """

    hidden: int
    mlp: int
    layers: int
    heads: int
    head_dim: int
    stored: str
    largest: Mapping[str, int]
    max_position: int
    steps: int
    decay: int
    first_tokens: int
    step_tokens: int
    grow_steps: int
    processes: int
    kv_heads: int = 2


SHORT = {
    "recall": 170,
    "copy": 115,
    "hot": 115,
    "sub": 80,
    "add": 40,
    "mul": 32,
    "count": 60,
    "path": 100,
    "hops": 32,
    "needle": 32,
}
"""Final sizes with traces of up to about 1,000 tokens, in lines."""

PRESETS = {
    "tiny": Preset(
        hidden=128,
        mlp=384,
        layers=4,
        heads=4,
        head_dim=32,
        stored="float32",
        largest={"recall": 170, "copy": 115, "hot": 115, "sub": 80},
        max_position=1300,
        steps=2500,
        decay=900,
        first_tokens=3072,
        step_tokens=6144,
        grow_steps=3000,
        processes=2,
    ),
    "small": Preset(
        hidden=192,
        mlp=512,
        layers=4,
        heads=8,
        head_dim=32,
        stored="bfloat16",
        largest=SHORT,
        max_position=1400,
        steps=5000,
        decay=1500,
        first_tokens=2048,
        step_tokens=6144,
        grow_steps=4000,
        processes=2,
    ),
    "base": Preset(
        hidden=320,
        mlp=864,
        layers=6,
        heads=8,
        head_dim=32,
        stored="bfloat16",
        largest=SHORT,
        max_position=1400,
        steps=3400,
        decay=1000,
        first_tokens=2048,
        step_tokens=6144,
        grow_steps=3400,
        processes=2,
    ),
    "full": Preset(
        hidden=256,
        mlp=768,
        layers=8,
        heads=8,
        head_dim=64,
        stored="bfloat16",
        largest={
            "recall": 200,
            "copy": 110,
            "hot": 110,
            "sub": 110,
            "add": 100,
            "mul": 100,
            "count": 100,
            "path": 110,
            "hops": 100,
            "needle": 100,
        },
        max_position=5200,
        steps=6000,
        decay=2000,
        first_tokens=16384,
        step_tokens=65536,
        grow_steps=3000,
        processes=2,
    ),
}
"""``small`` and ``base`` are for two cores, ``full`` is for a GPU."""
