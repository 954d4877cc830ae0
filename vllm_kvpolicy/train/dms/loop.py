"""Trains a model to drop tokens; resumes interrupted runs.

Source: DMS (arXiv 2506.05345) section 3; https://github.com/NVIDIA/Model-Optimizer/
tree/a2fbac7b/experimental/dms. Deviations: channels fade while the teacher is
distilled, not while text is learned.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from vllm_kvpolicy.train.dms.attention import noise_of
from vllm_kvpolicy.train.dms.losses import compression, distillation
from vllm_kvpolicy.train.dms.retrofit import Retrofit
from vllm_kvpolicy.train.loop import Run

BETAS = (0.9, 0.95)  # of Adam
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm


def train(
    retrofit: Retrofit,
    rows: Iterator[torch.Tensor],
    state: Path,
    reached: Callable[[float], None],
    save_steps: int = 100,
) -> None:
    """Train in place to the end, starting from the state file if there is one.

    Args:
        retrofit: teacher and student.
        rows: [T] int64 token ids each, in the same order each time; see `Run.take`.
        state: state file; kept when the run is done.
        reached: called with each target when it is reached.
        save_steps: steps between two saves.

    Raises:
        ValueError: the state has other settings, there are too few rows, or the loss is
            not finite.
    """
    settings, tensors = retrofit.settings, retrofit.tensors()
    optimizer = torch.optim.Adam(list(tensors.values()), betas=BETAS)

    def step(number: int, batch: list[torch.Tensor]) -> dict[str, str]:
        optimizer.param_groups[0]["lr"] = settings.rate(number)
        return _step(retrofit, number, batch, optimizer)

    milestones = {
        done: partial(reached, target) for done, target in settings.milestones.items()
    }
    run = Run(settings.flavour, settings, tensors, optimizer, state, save_steps)
    run.take(rows, step, milestones)


def _step(
    retrofit: Retrofit,
    number: int,
    batch: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> dict[str, str]:
    """Take one optimiser step and return its mean losses as text."""
    settings = retrofit.settings
    if retrofit.weights is None and number == settings.fade_steps:
        retrofit.clear_channels()
    optimizer.zero_grad(set_to_none=True)
    found = torch.zeros(2)
    for index, row in enumerate(batch):
        loss, distilled, dropped = _losses(retrofit, number, index, row)
        if not loss.isfinite():
            raise ValueError(f"loss: got {loss.item()}, expected a finite number")
        (loss / len(batch)).backward()
        found += torch.stack([distilled, dropped]).detach().cpu() / len(batch)
    parameters = list(retrofit.tensors().values())
    torch.nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
    optimizer.step()
    return {
        "distillation": f"{found[0]:.4f}",
        "dropped": f"{found[1]:.3f}",
        "wanted": f"{settings.dropped(number):.3f}",
    }


def _losses(
    retrofit: Retrofit, number: int, index: int, row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of one row, its distillation loss and its mean decision."""
    settings, teacher = retrofit.settings, retrofit.teacher
    with torch.no_grad():
        wanted = teacher.hidden(row)
    fade = settings.fade(number)
    noise = None
    if fade is None:
        noise = noise_of(teacher, len(row), settings.seed, number, index)
    student = retrofit.dropping(noise=noise, fade=fade)
    got = retrofit.student.hidden(row, student)
    distilled = distillation(retrofit.student, got, teacher, wanted, row)
    if fade is not None:
        return distilled, distilled, torch.zeros_like(distilled)
    alphas = student.alphas()
    missing = compression(alphas, settings.dropped(number))
    loss = distilled + settings.compression_weight * missing
    return loss, distilled, alphas.mean()
