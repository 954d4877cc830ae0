"""Settings and schedule of a DMS run.

Source: DMS (arXiv 2506.05345) section 3 and appendix; https://github.com/NVIDIA/
Model-Optimizer/tree/a2fbac7b/experimental/dms. Deviations: the compression ratio may
rest at targets, with another learning rate.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the defaults are NVIDIA's recipe for Qwen3-8B with adapters.

    Args:
        flavour: "adapter" or "borrowed".
        targets: compression ratios, rising, each above 1; a result is written at each.
        steps_per_ratio: steps in which the ratio rises by 1.
        hold_steps: steps that it rests at each target; the recipe has none.
        fade_steps: steps at the start in which borrowed channels fade.
        window: W; query i sees key j where i - j <= W.
        alpha_scale: factor on the number that decides.
        alpha_offset: subtracted from the product.
        temperature: temperature of the sigmoid.
        compression_weight: weight of the loss for dropping too few tokens.
        rows_per_step: sequences per step.
        learning_rate: Adam's, constant except for `hold_rate`.
        hold_rate: factor on the learning rate while the ratio rests.
        seed: for noise and the order of rows.
        data: description of the rows.
    """

    flavour: str = "adapter"
    targets: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0)
    steps_per_ratio: float = 34.0
    hold_steps: int = 0
    fade_steps: int = 0
    window: int = 512
    alpha_scale: float = 100.0
    alpha_offset: float = 5.0
    temperature: float = 0.1
    compression_weight: float = 1.0
    rows_per_step: int = 8
    learning_rate: float = 3e-5
    hold_rate: float = 1.0
    seed: int = 42
    data: str = ""

    @property
    def milestones(self) -> dict[int, float]:
        """Targets by the step at which their rest ends, such as {34: 2.0, 102: 4.0}."""
        done, reached, found = self.fade_steps, 1.0, {}
        for target in self.targets:
            done += self._rise(reached, target) + self.hold_steps
            found[done] = reached = target
        return found

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return max(self.milestones)

    def ratio(self, step: int) -> float:
        """Return the compression ratio of a step's loss; 1 while channels fade."""
        return self._place(step)[0]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * (self.hold_rate if self._place(step)[1] else 1)

    def _place(self, step: int) -> tuple[float, bool]:
        """Return the ratio of a step and whether the ratio rests."""
        step, reached = step - self.fade_steps, 1.0
        if step < 0:
            return reached, False
        for target in self.targets:
            rise = self._rise(reached, target)
            if step < rise:
                return reached + (target - reached) * step / rise, False
            step, reached = step - rise - self.hold_steps, target
            if step < 0:
                break
        return reached, True

    def dropped(self, step: int) -> float:
        """Return the share of tokens to drop at a step, 1 - 1 / ratio."""
        return 1 - 1 / self.ratio(step)

    def fade(self, step: int) -> float | None:
        """Return the factor on borrowed channels, which falls to 0; None afterwards."""
        if step >= self.fade_steps:
            return None
        return 1 - (step + 1) / self.fade_steps

    def _rise(self, reached: float, target: float) -> int:
        """Return the number of steps from one ratio to another, at least one."""
        return max(1, round((target - reached) * self.steps_per_ratio))


ADAPTER = Settings()
# The paper's; it gives no learning rate, so this is the recipe's.
BORROWED = Settings(
    flavour="borrowed",
    targets=(2.0, 4.0, 8.0),
    steps_per_ratio=100.0,
    fade_steps=2000,
    window=256,
    rows_per_step=1024,
)
