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
from vllm_kvpolicy.train.rows import Row

BETAS = (0.9, 0.95)  # of Adam
LARGEST_GRADIENT = 1.0  # gradients are clipped to this norm


def train(
    retrofit: Retrofit,
    rows: Iterator[Row],
    state: Path,
    reached: Callable[[float], None],
    save_steps: int = 100,
) -> None:
    """Train in place to the end, starting from the state file if there is one.

    Args:
        retrofit: teacher and student.
        rows: in the same order each time; see `Run.take`.
        state: state file; kept when the run is done.
        reached: called with each target when it is reached.
        save_steps: steps between two saves.

    Raises:
        ValueError: see `Run.take`.
    """
    settings, tensors = retrofit.settings, retrofit.tensors()

    def begin(step: int) -> float:
        if retrofit.weights is None and step == settings.fade_steps:
            retrofit.clear_channels()
        return settings.rate(step)

    run = Run(
        name=settings.flavour,
        settings=settings,
        tensors=tensors,
        losses=partial(_losses, retrofit),
        optimizer=torch.optim.Adam(list(tensors.values()), betas=BETAS),
        begin=begin,
        state=state,
        save_steps=save_steps,
        largest_gradient=LARGEST_GRADIENT,
    )
    milestones = {
        done: partial(reached, target) for done, target in settings.milestones.items()
    }
    run.take(rows, milestones)


def _losses(
    retrofit: Retrofit, step: int, index: int, row: Row
) -> dict[str, torch.Tensor]:
    """Return the loss of a row, its distillation loss, mean decision and the target."""
    settings, teacher = retrofit.settings, retrofit.teacher
    with torch.no_grad():
        wanted = teacher.hidden(row.ids)
    fade = settings.fade(step)
    noise = None
    if fade is None:
        noise = noise_of(teacher, len(row), settings.seed, step, index)
    student = retrofit.dropping(noise=noise, fade=fade)
    got = retrofit.student.hidden(row.ids, student)
    total, number = distillation(retrofit.student, got, teacher, wanted, row)
    distilled = total / max(number, 1)
    target = torch.full_like(distilled, settings.dropped(step))
    loss, dropped = distilled, torch.zeros_like(distilled)
    if fade is None:
        alphas = student.alphas()
        dropped = alphas.mean()
        missing = compression(alphas, settings.dropped(step))
        loss = distilled + settings.compression_weight * missing
    return {
        "loss": loss,
        "distillation": distilled,
        "dropped": dropped,
        "wanted": target,
    }
