"""Owns the curriculum: families, sizes, and how far a training run has come."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_TRAINING_SEED = 1 << 40
"""Training problems use this seed and later ones, evaluation uses earlier ones."""

LOOK_UPS = ("recall", "copy")
"""What all other families are made of, so these come first."""
LOOK_UP_LINES = 16
"""Until ``copy`` has this size, look-ups get most steps."""


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

    ladders: dict[str, Ladder]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    next_seed: int = FIRST_TRAINING_SEED

    @classmethod
    def start(cls, families: Mapping[str, int]) -> "Progress":
        """Returns the progress of a run that has not begun."""
        return cls({name: Ladder() for name in families})

    @classmethod
    def from_dict(cls, saved: dict) -> "Progress":
        """Reads what ``dataclasses.asdict`` wrote."""
        ladders = {name: Ladder(**row) for name, row in saved["ladders"].items()}
        return cls(**{**saved, "ladders": ladders})


def family_weights(progress: Progress, largest: Mapping[str, int]) -> dict[str, float]:
    """Returns how often each family is drawn, in any unit.

    Look-ups come first; later a family that has its final size gets fewer steps.
    """
    ladders = progress.ladders
    if "copy" in ladders and ladders["copy"].lines < min(
        LOOK_UP_LINES, largest["copy"]
    ):
        others = max(1, len(ladders) - len(LOOK_UPS))
        return {name: 1.0 if name in LOOK_UPS else 1.2 / others for name in ladders}
    return {
        name: 1.0 if row.lines < largest[name] else 0.5 for name, row in ladders.items()
    }


def pick_size(
    rng: random.Random, progress: Progress, largest: Mapping[str, int]
) -> tuple[str, int]:
    """Draws the family and the size of the next batch, half of them near the top."""
    weights = family_weights(progress, largest)
    family = rng.choices(list(weights), list(weights.values()))[0]
    top = progress.ladders[family].lines
    if rng.random() < 0.5:
        return family, rng.randint(math.ceil(0.8 * top), top)
    return family, round(math.exp(rng.uniform(math.log(3), math.log(top))))
