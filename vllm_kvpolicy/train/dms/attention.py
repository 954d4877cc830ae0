"""A forward pass that drops tokens as DMS does: softly in training, or for good.

Source: DMS (arXiv 2506.05345) section 3; https://github.com/NVIDIA/Model-Optimizer/
tree/a2fbac7b/experimental/dms, where a token decides on the one before it. Deviations:
borrowed channels are read from rotated queries by undoing the rotation; they fade
before and after RoPE, so that nothing jumps when the first tokens are dropped.
"""

import random
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.dms_decision import DecisionWeights, decision_logits
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import settled
from vllm_kvpolicy.train.attention import Student, hidden, weighed
from vllm_kvpolicy.train.base import Base
from vllm_kvpolicy.train.dms.settings import Settings

SHIFT = 1  # the token at t decides on the one at t - SHIFT


@dataclass
class Dropping(Student):
    """How one forward pass drops tokens, and the logits that decide.

    Args:
        settings: settings of the run.
        rope: the model's rotary embedding.
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
        """Return queries without borrowed channels, and the logit that decides per key.

        This is the next token's logit, with noise if there is any. The last key has
        minus infinity.
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
        return query, F.pad(logits[..., SHIFT:], (0, SHIFT), value=-torch.inf)

    def bias(self, known: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the bias on the logits of queries [Q]; see `Student`."""
        window = self.settings.window + 1
        if self.noise is not None:
            return weighed(F.logsigmoid(-known), window, 0, queries)
        return hidden(known <= self.least, window, 0, queries)

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
        rope: the model's rotary embedding.
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
        base: the model.
        num_tokens: T.
        place: integers that identify the row; equal ones give equal noise.
    """
    generator = torch.Generator()
    generator.manual_seed(random.Random(str(place)).getrandbits(32))
    shape = (base.num_layers, base.num_kv_heads, num_tokens)
    return torch.rand(shape, generator=generator).logit(eps=1e-6).to(base.device)
