"""Owns the curriculum: families, sizes, and how far a training run has come.

Called by the training script. Pure Python.
"""

import math
import random
from dataclasses import dataclass, field

FIRST_TRAINING_SEED = 1 << 40
"""Training problems use this seed and later ones, evaluation uses earlier ones."""

LARGEST = {"recall": 170, "copy": 115, "hot": 115, "sub": 80}
"""Final size of each family, in lines."""
EARLY_STEPS = 900
"""Until then look-ups come first; arithmetic can only be learned after them."""
EARLY_WEIGHTS = {"recall": 0.4, "copy": 0.45, "hot": 0.05, "sub": 0.1}
"""Share of the early steps that each family gets."""
LATE_WEIGHTS = {"recall": 0.2, "copy": 0.35, "hot": 0.1, "sub": 0.35}
"""Share of the later steps."""


@dataclass
class Ladder:
    """How far the curriculum has come in one family.

    Attributes:
        lines: present largest size.
        right: moving average of the share of completion tokens that the model
            predicts at the top sizes.
        tried: steps at the top sizes since the size last grew.
    """

    lines: int = 4
    right: float = 0.0
    tried: int = 0

    def record(self, lines: int, share: float, largest: int, target: float) -> None:
        """Takes the result of one step and grows the size when it is solved."""
        if lines < 0.8 * self.lines:
            return
        self.tried += 1
        self.right += (share - self.right) / min(self.tried, 4)
        if self.tried >= 6 and self.right >= target and self.lines < largest:
            self.lines = min(largest, 2 * self.lines)
            self.right, self.tried = 0.0, 0


@dataclass
class Progress:
    """Everything about a run that is not a tensor; saved with the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    next_seed: int = FIRST_TRAINING_SEED
    ladders: dict[str, Ladder] = field(
        default_factory=lambda: {name: Ladder() for name in LARGEST}
    )

    @classmethod
    def from_dict(cls, saved: dict) -> "Progress":
        """Reads what ``dataclasses.asdict`` wrote."""
        ladders = {name: Ladder(**row) for name, row in saved["ladders"].items()}
        return cls(**{**saved, "ladders": ladders})


def pick_size(rng: random.Random, progress: Progress) -> tuple[str, int]:
    """Draws the family and the size of the next batch, half of them near the top."""
    weights = EARLY_WEIGHTS if progress.step < EARLY_STEPS else LATE_WEIGHTS
    family = rng.choices(list(weights), list(weights.values()))[0]
    top = progress.ladders[family].lines
    if rng.random() < 0.5:
        return family, rng.randint(math.ceil(0.8 * top), top)
    return family, round(math.exp(rng.uniform(math.log(3), math.log(top))))
