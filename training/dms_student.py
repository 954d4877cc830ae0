"""DMS's settings, its student, and a forward pass that drops tokens.

It drops softly in training, or for good.

Source: DMS (arXiv 2506.05345) section 3 and appendices; https://github.com/NVIDIA/
Model-Optimizer/tree/a2fbac7b/experimental/dms, where a token decides on the one before
it. Deviations: the compression ratio may rest at targets, with another learning rate;
borrowed channels are read from rotated queries by undoing the rotation; they fade
before and after RoPE, so that nothing jumps when the first tokens are dropped; the
weights that produce them are set to 0 when they have faded, so that decisions start
from -offset.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from training.model import Base, Student, hidden
from training.visibility import settled
from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.kernels.rope import Rope

SHIFT = 1  # the token at t decides on the one at t - SHIFT


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
        compression_weight: weight of the loss for dropping too few tokens.
        rows_per_step: sequences per step.
        learning_rate: Adam's, constant except for `hold_rate`.
        hold_rate: factor on the learning rate while the ratio rests.
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


@dataclass
class Dropping(Student):
    """How one forward pass drops tokens, and the logits that decide.

    Args:
        epsilon: its norms add this to mean squares.
        weights: adapter of all layers; None where channels are borrowed.
        noise: [L, H, T] float32, added to logits; decisions are then between 0 and 1,
            as in training. None: they are 0 or 1, as in a server.
        least: without noise, tokens with a logit above this are dropped.
        fade: factor on borrowed channels while nothing is dropped yet; None afterwards.
        logits: by layer, [B, H, T] float32, written during the pass.
    """

    settings: Settings
    rope: Rope
    epsilon: float
    weights: DecisionWeights | None = None
    noise: torch.Tensor | None = None
    least: float = 0.0
    fade: float | None = None
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def always(self) -> tuple[int, int]:
        """The window, in which a query sees itself, too; no sinks."""
        return self.settings.window + 1, 0

    def enter(self, layer: int, hidden: torch.Tensor) -> None:
        """Compute the adapter's logits, if there is one."""
        if self.weights is not None:
            scale, offset = self.settings.alpha_scale, self.settings.alpha_offset
            weights = self.weights.layer(layer)
            logits = decision_logits(hidden, weights, self.epsilon, scale, offset)
            self.logits[layer] = logits.transpose(-1, -2)

    def prepare(
        self, layer: int, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return queries without borrowed channels, and the log weights of the keys.

        The next token's logit decides, with noise if there is any. The last key, which
        has no next one, is kept.
        """
        if self.weights is None:
            fade = self.fade or 0.0
            query, value = without_channel(query, key.shape[1], self.rope, fade)
            scale, offset = self.settings.alpha_scale, self.settings.alpha_offset
            self.logits[layer] = value * scale - offset
        if self.fade is not None:
            return query, None
        logits = self.logits[layer]
        if self.noise is not None:
            logits = (logits + self.noise[layer]) / self.settings.temperature
        deciding = F.pad(logits[..., SHIFT:], (0, SHIFT), value=-torch.inf)
        if self.noise is not None:
            return query, F.logsigmoid(-deciding)
        return query, hidden(deciding <= self.least)

    def keep(self) -> torch.Tensor:
        """Return the keep bits [L, B, H, T] of the pass, as in a server."""
        logits = torch.stack([self.logits[i] for i in sorted(self.logits)])
        return settled(logits <= self.least, SHIFT)

    def alphas(self) -> torch.Tensor:
        """Return decisions [L, B, H, T]: 0 or 1, with the gradient of the soft ones."""
        logits = torch.stack([self.logits[i] for i in sorted(self.logits)])
        assert self.noise is not None, "soft decisions need noise"
        noisy = (logits + self.noise[:, None]) / self.settings.temperature
        soft = noisy.sigmoid()
        return (soft > 0.5).float() - soft.detach() + soft


def without_channel(
    query: torch.Tensor, num_kv_heads: int, rope: Rope, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Remove the last channel of the first query head of each KV head.

    Args:
        query: [B, Hq, T, D], after RoPE.
        num_kv_heads: H.
        share: factor on the channel, before RoPE and again after it.

    Returns:
        The queries without the channel, and its values [B, H, T] float32 before RoPE.
    """
    group = query.shape[1] // num_kv_heads
    first = query[:, ::group].float()
    half = first.shape[-1] // 2
    positions = torch.arange(first.shape[-2], device=first.device)
    angles = rope.angles(positions)[..., -1]
    cos, sin = angles.cos().float(), angles.sin().float()
    value = (first[..., -1] * cos - first[..., half - 1] * sin) / rope.scaling
    taken = (1 - share) * value * rope.scaling
    changed = first.clone()
    changed[..., half - 1] = first[..., half - 1] + taken * sin
    changed[..., -1] = share * (first[..., -1] - taken * cos)
    out = query.clone()
    out[:, ::group] = changed.to(query.dtype)
    return out, value


def noise_of(base: Base, num_tokens: int, *place: int) -> torch.Tensor:
    """Return logistic noise [L, H, T] float32 for the logits of a row.

    The difference of two Gumbel variables has this distribution.

    Args:
        num_tokens: T.
        place: integers that identify the row; equal ones give equal noise.
    """
    generator = torch.Generator()
    generator.manual_seed(random.Random(str(place)).getrandbits(32))
    shape = (base.num_layers, base.num_kv_heads, num_tokens)
    return torch.rand(shape, generator=generator).logit(eps=1e-6).to(base.device)


@dataclass(frozen=True)
class Retrofit:
    """A teacher, a student, and the adapter if there is one.

    Args:
        student: the same object with an adapter, a copy with borrowed channels.
        weights: the adapter of all layers, float32; None where channels are borrowed.
    """

    settings: Settings
    teacher: Base
    student: Base
    weights: DecisionWeights | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the trained tensors by name."""
        if self.weights is None:
            return dict(self.student.model.named_parameters())
        return {"norm": self.weights.norm, "projection": self.weights.projection}

    def dropping(self, **how: Any) -> Dropping:
        """Return a student's pass; `how` has fields of `Dropping`."""
        base = self.student
        return Dropping(self.settings, base.rope, base.epsilon, self.weights, **how)

    @torch.no_grad()
    def clear_channels(self) -> None:
        """Set the weights that produce borrowed channels to 0."""
        for layer in self.student.decoder.layers:
            projection, size = layer.self_attn.q_proj, self.student.head_dim
            heads = projection.out_features // size
            group = heads // self.student.num_kv_heads
            projection.weight.view(heads, size, -1)[::group, -1] = 0
            if projection.bias is not None:
                projection.bias.view(heads, size)[::group, -1] = 0


def new_adapter(base: Base) -> DecisionWeights:
    """Return an adapter that drops nothing: projections are 0, norm weights 1."""
    layers, size, device = base.num_layers, base.hidden_size, base.device
    projection = torch.zeros(layers, base.num_kv_heads, size, device=device)
    norm = torch.ones(layers, size, device=device)
    return DecisionWeights(Parameter(norm), Parameter(projection))
