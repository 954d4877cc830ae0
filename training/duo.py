"""`python -m training duo`: finds out which KV heads need the full cache.

The model is not changed. Each KV head learns one number from 0 to 1: of its output, so
much comes from attention to all tokens, the rest from attention to the window and the
sinks. `--kv-policy duo` lets the heads with the largest numbers keep everything. An
interrupted run resumes.

Source: DuoAttention (arXiv 2410.10819) section 2 and
https://github.com/mit-han-lab/duo-attention/blob/0aef1ae/duo_attn/train.py.
Deviations: the rows are those of the other trainers, of 4,096 tokens, where the authors
hide passkeys in books of up to 32,000 and take the distance at the tokens of these. The
learning rate falls as a cosine.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from torch.nn import Parameter

from training import option
from training.figures import Figures, figures_of
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
from training.rows import Row
from training.run import Run
from training.wgkv import distance_of, distillation, rate
from vllm_kvpolicy.policies.admissions.duo import CONFIG_FILE, HEADS_FILE, Pattern


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are the authors'.

    Args:
        sparsity_weight: what the mean of the heads' numbers adds to the loss.
        window: tokens that every query sees, itself included.
        sinks: first tokens that every query sees.
        steps: optimiser steps.
        rows_per_step: sequences per step.
        learning_rate: highest learning rate of Adam.
        warmup: share of the steps in which the learning rate rises.
        seed: for the order of rows.
    """

    sparsity_weight: float = 0.05
    window: int = 256
    sinks: int = 128
    steps: int = 2000
    rows_per_step: int = 1
    learning_rate: float = 0.02
    warmup: float = 0.2
    seed: int = 42
    data: str = ""


@dataclass
class Mixing(Student):
    """One forward pass in which heads see more or less outside the window.

    Args:
        use: [L, H] float32 from 0 to 1, or bool as in a server.
        window, sinks: see `Settings`.
        num_tokens: T, written during the pass.
    """

    use: torch.Tensor
    window: int
    sinks: int
    num_tokens: int = 0

    @property
    def always(self) -> tuple[int, int]:
        """The window and the sinks."""
        return self.window, self.sinks

    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unchanged queries, and which keys are seen outside the window."""
        self.num_tokens = key.shape[2]
        keep = self.use[layer][None, :, None].expand(key.shape[:3])
        return query, hidden(keep if self.is_served else torch.zeros_like(keep).bool())

    @property
    def is_served(self) -> bool:
        """Whether a head keeps everything or not, as in a server."""
        return self.use.dtype == torch.bool

    def mixed(self, layer: int) -> torch.Tensor | None:
        """Return how much of a layer's outputs is attention to all keys, [H]."""
        return None if self.is_served else self.use[layer].clamp(0, 1)

    def keep(self) -> torch.Tensor:
        """Return the keep bits [L, B, H, T] of a pass as in a server."""
        keep = self.use[:, None, :, None].repeat(1, 1, 1, self.num_tokens)
        keep[..., : self.sinks] = True
        return keep


def train(
    base: Base,
    rows: Iterator[Row],
    settings: Settings,
    state: Path,
    save_steps: int = 100,
) -> torch.Tensor:
    """Train to the end, starting from the state file if there is one.

    Args:
        rows: in the same order each time; see `Run.take`.
        state: state file; kept when the run is done.

    Returns:
        [L, H] float32 from 0 to 1, how much each head needs the full cache.

    Raises:
        ValueError: see `Run.take`.
    """
    shape = base.num_layers, base.num_kv_heads
    use = Parameter(torch.ones(shape, device=base.device))

    def losses(step: int, index: int, row: Row) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            teacher = base.hidden(row.ids)
        student = base.hidden(row.ids, Mixing(use, settings.window, settings.sinks))
        distilled = distillation(student, teacher, row.counts)
        loss = distilled + settings.sparsity_weight * use.mean()
        return {"loss": loss, "distillation": distilled, "use": use.mean()}

    def begin(step: int) -> float:
        with torch.no_grad():
            use.clamp_(0, 1)
        return settings.learning_rate * rate(step, settings.steps, settings.warmup)

    optimizer = torch.optim.Adam([use])
    run = Run(
        "duo", settings, {"use": use}, losses, optimizer, begin, state, save_steps
    )
    run.take(rows)
    return use.detach().clamp(0, 1)


def measure(
    base: Base, rows: Sequence[Row], pattern: Pattern, sparsity: float
) -> Figures:
    """Measure a pattern on validation rows.

    Args:
        rows: at least one.
        sparsity: share of the heads that keep only window and sinks, as served.
    """
    use = pattern.use.float().to(base.device)
    levels = use, pattern.retrieving(sparsity).to(base.device), use > math.inf

    def passes(_: int, __: Row) -> list[Mixing]:
        return [Mixing(level, pattern.recent, pattern.sinks) for level in levels]

    return figures_of(base, rows, passes, distance_of(base), pattern.recent)


def save(pattern: Pattern, folder: Path) -> None:
    """Write a pattern as the authors publish theirs; see `duo.load`."""
    lines = ["\t".join(f"{use:.6f}" for use in row) for row in pattern.use.tolist()]
    (folder / HEADS_FILE).write_text("\n".join(lines) + "\n")
    sizes = {"sink_size": pattern.sinks, "recent_size": pattern.recent}
    (folder / CONFIG_FILE).write_text(json.dumps(sizes) + "\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; a wrong one ends the process."""
    plain = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m training duo",
        description="Find the KV heads that need the full cache (DuoAttention). The "
        "defaults are the authors'. The same command resumes an interrupted run.",
    )
    add_model(parser)
    add_rows(parser, length=4096, validation_rows=100)
    add_schedule(parser, plain)
    told = "what the mean of the heads' numbers adds to the loss"
    option(parser, "--sparsity-weight", float, plain.sparsity_weight, told)
    told = "share of heads without the full cache for which figures are measured"
    option(parser, "--sparsity", float, 0.5, told)
    add_machine(parser)
    given = parser.parse_args(arguments)
    check_numbers(parser, given)
    if not 0 <= given.sparsity <= 1:
        parser.error(f"sparsity: got {given.sparsity}, expected a number in [0, 1]")
    return given


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        OSError, ValueError: something that was given cannot be used.
    """
    given = parse(arguments)
    rows, base = rows_of(given), base_of(given)
    folder = given.output
    folder.mkdir(parents=True, exist_ok=True)
    run = settings_of(given, Settings)
    ordered = rows.shuffled(run.seed)
    use = train(base, ordered, run, folder / "duo.state", given.save_steps)
    pattern = Pattern(use.double().cpu(), run.sinks, run.window, folder)
    found = measure(base, rows.validation, pattern, given.sparsity)
    if PartialState().is_main_process:
        save(pattern, folder)
        content = {"model": given.model, "sparsity": given.sparsity, **asdict(run)}
        told = json.dumps(content | found.to_dict(), indent=2)
        (folder / "figures.json").write_text(told + "\n")
        print(f"heads use {use.mean():.2f}; {found.losses_in_words()}; wrote {folder}")
    PartialState().destroy_process_group()
