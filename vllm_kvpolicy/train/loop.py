"""Runs training steps and resumes from a state file."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

Step = Callable[[int, list[torch.Tensor]], dict[str, str]]
"""Takes one step of a number and rows; returns text for the progress bar by name."""


@dataclass(frozen=True)
class Run:
    """A training run and its state file.

    Args:
        name: label of the progress bar.
        settings: a dataclass with `steps` and `rows_per_step`.
        tensors: trained tensors by name.
        optimizer: updates these tensors.
        state: state file; kept when the run is done.
        save_steps: steps between two saves.
    """

    name: str
    settings: Any
    tensors: Mapping[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    state: Path
    save_steps: int = 100

    def take(
        self,
        rows: Iterator[torch.Tensor],
        step: Step,
        milestones: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        """Train to the end, starting from the state file if there is one.

        Args:
            rows: [T] int64 token ids each. A resumed run skips the rows that the state
                has seen, so they must come in the same order each time.
            step: takes one step.
            milestones: called after this many steps; the state is then saved.

        Raises:
            ValueError: the state has other settings, or there are too few rows.
        """
        steps, num_rows = self.settings.steps, self.settings.rows_per_step
        milestones = milestones or {}
        done = self._load()
        rows = islice(rows, done * num_rows, None)
        with tqdm(total=steps, initial=done, unit="step", desc=self.name) as shown:
            for number in range(done, steps):
                batch = list(islice(rows, num_rows))
                if len(batch) < num_rows:
                    raise ValueError(f"rows: ran out at step {number + 1} of {steps}")
                shown.set_postfix(step(number, batch))
                shown.update()
                done = number + 1
                reached = milestones.get(done)
                if reached:
                    reached()
                if reached or done == steps or done % self.save_steps == 0:
                    self._save(done)

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
        content = torch.load(path, map_location="cpu", weights_only=True)
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
