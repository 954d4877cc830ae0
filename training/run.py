"""Runs training steps on one or several devices, and resumes from a state file.

The rows of a step are shared out among the processes of a launcher, such as `accelerate
launch`. Each holds the whole model; gradients are averaged. What is random depends on
the seed, the step and the row alone, so a run may go on with other processes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tqdm import tqdm

from training.rows import Row

RowLosses = Callable[[int, int, Row], dict[str, torch.Tensor]]
"""Returns scalars by name for a step, the row's place in it, and the row.

`loss` is minimised; the others are shown, as means over the rows of a step.
"""

SHARDED = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)


class Trained(torch.nn.Module):
    """The trained tensors, and what is computed from them, as accelerate needs both."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], losses: RowLosses) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(tensors.values())
        self.losses = losses

    def forward(self, step: int, index: int, row: Row) -> dict[str, torch.Tensor]:
        """Return the losses of a row."""
        return self.losses(step, index, row)


@dataclass(frozen=True)
class Run:
    """A training run and its state file.

    Args:
        settings: a dataclass with `steps` and `rows_per_step`.
        tensors: trained parameters by name.
        begin: called before a step with its number; returns its learning rate.
        state: state file; kept when the run is done.
        save_steps: steps between two saves.
        largest_gradient: gradients are clipped to this norm; None for no limit.
    """

    name: str
    settings: Any
    tensors: Mapping[str, torch.Tensor]
    losses: RowLosses
    optimizer: torch.optim.Optimizer
    begin: Callable[[int], float]
    state: Path
    save_steps: int = 100
    largest_gradient: float | None = None

    def take(
        self,
        rows: Iterator[Row],
        milestones: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """Train to the end, starting from the state file if there is one.

        Args:
            rows: for all processes. A resumed run skips the rows that the state has
                seen, so they must come in the same order each time.
            milestones: called after this many steps; the state is then saved.

        Raises:
            ValueError: the state has other settings, there are too few rows, the
                processes cannot share them, or the loss is not finite.
        """
        steps, num_rows = self.settings.steps, self.settings.rows_per_step
        milestones = milestones or {}
        accelerator = accelerator_for(num_rows)
        done = self._load()
        rows = islice(rows, done * num_rows, None)
        trained = accelerator.prepare(Trained(self.tensors, self.losses))
        optimizer = accelerator.prepare(self.optimizer)
        is_main = accelerator.is_main_process
        with tqdm(
            total=steps, initial=done, unit="step", desc=self.name, disable=not is_main
        ) as shown:
            for number in range(done, steps):
                batch = list(islice(rows, num_rows))
                if len(batch) < num_rows:
                    raise ValueError(f"rows: ran out at step {number + 1} of {steps}")
                means = self._step(accelerator, trained, optimizer, number, batch)
                shown.set_postfix({name: f"{mean:.4f}" for name, mean in means.items()})
                shown.update()
                done = number + 1
                reached = milestones.get(done)
                if reached:
                    reached()
                is_due = reached or done == steps or done % self.save_steps == 0
                if is_due and is_main:
                    self._save(done)

    def _step(
        self,
        accelerator: Accelerator,
        trained: torch.nn.Module,
        optimizer: Any,
        number: int,
        batch: list[Row],
    ) -> dict[str, float]:
        """Take one optimiser step and return its means over all rows."""
        optimizer.param_groups[0]["lr"] = self.begin(number)
        rank, count = accelerator.process_index, accelerator.num_processes
        found = []
        for index in range(rank, len(batch), count):
            with accelerator.accumulate(trained):
                losses = trained(number, index, batch[index])
                accelerator.backward(losses["loss"])
                if self.largest_gradient is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(
                        self.tensors.values(), self.largest_gradient
                    )
                optimizer.step()
                optimizer.zero_grad()
            found.append(torch.stack([loss.detach() for loss in losses.values()]))
        mean = accelerator.reduce(torch.stack(found).mean(0), "mean")
        means = dict(zip(losses, mean.tolist(), strict=True))
        if not math.isfinite(means["loss"]):
            raise ValueError(f"loss: got {means['loss']}, expected a finite number")
        return means

    def _save(self, step: int) -> None:
        """Write the state to a new file and rename it, so that no half file remains."""
        content = {
            "settings": asdict(self.settings),
            "step": step,
            "weights": {name: t.detach() for name, t in self.tensors.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        fresh = self.state.with_name(self.state.name + ".new")
        torch.save(content, fresh)
        fresh.replace(self.state)

    @torch.no_grad()
    def _load(self) -> int:
        """Restore the state if there is one, and return its number of steps, else 0."""
        path = self.state
        if not path.exists():
            return 0
        content = _read(path)
        for name, value in asdict(self.settings).items():
            known = content["settings"].get(name)
            if known != value:
                raise ValueError(
                    f"{path}: {name}: got {known!r} from an earlier run, expected "
                    f"{value!r}; remove the file to start over"
                )
        for name, tensor in self.tensors.items():
            found = content["weights"].get(name, torch.empty(0))
            if tensor.shape != found.shape:
                raise ValueError(
                    f"{path}: shape of {name}: got {list(found.shape)}, expected "
                    f"{list(tensor.shape)}; remove the file to start over"
                )
            tensor.copy_(found)
        self.optimizer.load_state_dict(content["optimizer"])
        return content["step"]


def _read(path: Path) -> dict[str, Any]:
    """Return what a state file holds; it cannot run code.

    Raises:
        ValueError: it is damaged, or no state.
    """
    content: Any = None
    with suppress(Exception):  # torch has no one error for what a broken file causes
        content = torch.load(path, map_location="cpu", weights_only=True)
    keys = {"settings", "step", "weights", "optimizer"}
    if not isinstance(content, dict) or not keys <= content.keys():
        raise ValueError(
            f"{path}: got content that cannot be read, expected the state of a "
            "training; remove the file to start over"
        )
    return content


def accelerator_for(rows_per_step: int) -> Accelerator:
    """Return what takes steps together with the other processes.

    Args:
        rows_per_step: rows of a step, of all processes.

    Raises:
        ValueError: a way of sharing that is not supported, or rows that do not divide.
    """
    accelerator = Accelerator(device_placement=False)
    kind, count = accelerator.distributed_type, accelerator.num_processes
    if kind in SHARDED:
        raise ValueError(
            f"launcher: got {kind.value}, expected plain processes, each with the "
            "whole model"
        )
    if rows_per_step % count:
        raise ValueError(
            f"rows_per_step: got {rows_per_step}, expected a multiple of the {count} "
            "processes"
        )
    accelerator.gradient_accumulation_steps = rows_per_step // count
    return accelerator
