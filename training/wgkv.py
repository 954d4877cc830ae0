"""`python -m training wgkv`: trains the write gates of a model.

The model is not changed. Its gates learn which tokens outside the window the model can
do without. Each sparsity weight gives one file of gates. An interrupted run resumes.

Source: WG-KV (arXiv 2512.17452) section 3.4 and appendix; the weight of positions,
which the paper omits, and the schedule are those of
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/scripts/train.py and its `src`.
Deviations: gates are evaluated in float32, and the key before RoPE is computed from the
rotated one, as in a server; sinks, which are always kept, cost nothing; the distance
may be that of answers only, where the authors' has all tokens; the learning rate of the
first step is not 0; validation comes at the end.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch.nn import Parameter

from training import option
from training.figures import Figures, RowLoss, figures_of
from training.model import Base, Student, hidden
from training.options import (
    add_machine,
    add_model,
    add_rows,
    add_schedule,
    base_of,
    check_numbers,
    rows_of,
    settings_of,
)
from training.rows import ReasonerRows, Row, Rows
from training.run import Run
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate
from vllm_kvpolicy.policies.admissions.wgkv import Gates

LEAST = 1e-3  # smallest gate in a logarithm; there is no gradient below it
EXPANSION = {"llama": 4.0, "qwen3": 1.5}  # hidden units per channel of a head
LAMBDAS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)  # the authors' grid


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are the authors'.

    Args:
        sparsity_weight: the paper's lambda.
        window: tokens that every query sees, itself included.
        steps: optimiser steps.
        rows_per_step: sequences per step.
        learning_rate: highest learning rate of AdamW.
        warmup: share of the steps in which the learning rate rises.
        expansion: hidden units of a gate per channel of a head; None for the authors'.
        seed: for initial weights and the order of rows.
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


@dataclass
class Gating(Student):
    """The gating of one forward pass, and its gate values.

    Args:
        window: tokens that every query sees, itself included.
        threshold: None weights keys by their gates, as in training; a number hides
            keys whose gate is not above it, as in a server.
        values: gates by layer, [B, H, T] float32, written during the pass.
    """

    weights: GateWeights
    rope: Rope
    window: int
    sinks: int = 0
    threshold: float | None = None
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def always(self) -> tuple[int, int]:
        """The window and the sinks."""
        return self.window, self.sinks

    def evaluate(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return and store the gates [B, H, T] of rotated keys [B, H, T, D]."""
        positions = torch.arange(keys.shape[-2], device=keys.device)
        before = self.rope.unrotate(keys, positions)
        self.values[layer] = gate(before, keys, self.weights.layer(layer))
        return self.values[layer]

    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unchanged queries and the log weights of the keys."""
        gates = self.evaluate(layer, key)
        if self.threshold is None:
            return query, log_weights(gates)
        return query, hidden(gates > self.threshold)

    def keep(self) -> torch.Tensor:
        """Return the keep bits [L, B, H, T] of a pass with a threshold."""
        gates = torch.stack([self.values[i] for i in sorted(self.values)])
        keep = gates > self.threshold
        keep[..., : self.sinks] = True
        return keep


def log_weights(gates: torch.Tensor) -> torch.Tensor:
    """Return log max(g, 0.001) of gates [..., T]; see `weighed`."""
    return gates.clamp(min=LEAST).log()


def distillation(
    student: torch.Tensor, teacher: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean squared difference of hidden states, float32.

    Args:
        student: [B, T, d] floating point.
        teacher: like `student`.
        counts: [T] bool, tokens that count; None for all, as the authors have it.
    """
    if counts is not None:
        counts = counts.to(student.device)
        student, teacher = student[:, counts], teacher[:, counts]
    return torch.nn.functional.mse_loss(student.float(), teacher.float())


def position_weights(num_tokens: int, window: int, sinks: int = 0) -> torch.Tensor:
    """Return the share of later queries for which a token's gate matters.

    With 4 tokens and a window of 2 the weights are [0.5, 1/3, 0, 0].

    Args:
        num_tokens: T, length of the sequence.

    Returns:
        [T] float32: w_j = 1 - min(1, window / (T - j)), 0 for sinks.
    """
    remaining = torch.arange(num_tokens, 0, -1, dtype=torch.float32)
    weights = 1 - (window / remaining).clamp(max=1)
    weights[:sinks] = 0
    return weights


def sparsity(gates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean of 1 - w + w (g + g (1 - g)); it is 1 if all gates are 1.

    Args:
        gates: [..., T] floating point, g.
        weights: [T], see `position_weights`.
    """
    weights = weights.to(gates.device)
    return (1 - weights + weights * gates * (2 - gates)).mean()


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
        rows: in the same order each time; see `Run.take`.
        state: state file; kept when the run is done.

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


def measure(
    base: Base,
    rows: Sequence[Row],
    weights: GateWeights,
    window: int,
    sinks: int,
    threshold: float,
) -> Figures:
    """Measure gates on validation rows.

    Args:
        rows: at least one.
        threshold: tokens with a gate above this are kept.
    """

    def passes(_: int, __: Row) -> list[Gating]:
        levels = (None, threshold, math.inf)
        return [Gating(weights, base.rope, window, sinks, level) for level in levels]

    return figures_of(base, rows, passes, distance_of(base), window)


def distance_of(base: Base) -> RowLoss:
    """Return what `figures_of` measures: the distance of hidden states."""

    def loss(
        row: Row, student: Student, teacher: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        found = distillation(base.hidden(row.ids, student), teacher, row.counts)
        return found * row.weight, row.weight

    return loss


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    parser = argparse.ArgumentParser(
        prog="python -m training wgkv",
        description="Train write gates (WG-KV) for a model. The defaults are the "
        "authors'. The same command resumes an interrupted run.",
    )
    add_model(parser)
    add_rows(parser, length=4096, validation_rows=750)
    _add_method(parser)
    add_machine(parser)
    given = parser.parse_args(arguments)
    check_numbers(parser, given)
    if not 0 < given.threshold < 1:
        parser.error(f"threshold: got {given.threshold}, expected a number in (0, 1)")
    return given


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Add the options of the method."""
    plain = Settings(0)
    parser.add_argument(
        "--lambdas",
        type=float,
        nargs="+",
        default=LAMBDAS,
        help=f"sparsity weights; each writes one gate file (default: {LAMBDAS})",
    )
    add_schedule(parser, plain)
    option(parser, "--threshold", float, 0.1, "tokens with a gate above this are kept")
    option(parser, "--weight-decay", float, plain.weight_decay, "weight decay of AdamW")
    parser.add_argument(
        "--expansion",
        type=float,
        help="hidden units of a gate per channel (default: 4 for llama, 1.5 for qwen3)",
    )


def gates_of(
    base: Base,
    given: argparse.Namespace,
    run: Settings,
    weights: GateWeights,
    found: Figures,
) -> Gates:
    """Return trained gates with the header of their file."""
    return Gates(
        model=given.model,
        flavour=base.flavour,
        num_layers=base.num_layers,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rope_theta=base.rope_theta,
        window=run.window,
        threshold=given.threshold,
        sinks=run.sinks,
        sparsity_weight=run.sparsity_weight,
        kept_fraction=found.kept_fraction,
        tensors=Gates.unstacked(weights.tensors()),
    )


def run_all(rows: Rows | ReasonerRows, base: Base, given: argparse.Namespace) -> None:
    """Train, measure and write gates for each sparsity weight."""
    given.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for sparsity_weight in given.lambdas:
        run = settings_of(given, Settings, sparsity_weight=sparsity_weight)
        file = given.output / f"wgkv-{sparsity_weight:g}.safetensors"
        weights = train(
            base,
            rows.shuffled(run.seed),
            run,
            file.with_suffix(".state"),
            given.save_steps,
        )
        found = measure(
            base, rows.validation, weights, run.window, run.sinks, given.threshold
        )
        if PartialState().is_main_process:
            results.append({"file": file.name, **asdict(run), **found.to_dict()})
            gates = gates_of(base, given, run, weights, found)
            write(file, gates, found, results)


def write(
    file: Path, gates: Gates, found: Figures, results: list[dict[str, Any]]
) -> None:
    """Write gates and the figures of all runs so far."""
    gates.save(file)
    content = {"model": gates.model, "threshold": gates.threshold, "runs": results}
    path = file.with_name("figures.json")
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(
        f"lambda {gates.sparsity_weight:g}: kept {gates.kept_fraction:.1%}; "
        f"{found.losses_in_words()}; wrote {file}"
    )


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    given = parse(arguments)
    run_all(rows_of(given), base_of(given), given)
    PartialState().destroy_process_group()
