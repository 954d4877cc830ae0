"""Trim: while heads hold more than the budget on average, each drops its lowest tenth.

n_lh <- n_lh - max(1, floor(share * n_lh)) in all layers l and KV heads h at once,
until mean_lh (n_lh + m_lh) <= K; m counts must-keep tokens, n the others that a head
holds, of which it keeps those with the highest scores. So a head that an admission made
twice as long as another stays twice as long.

Source: WG-KV (arXiv 2512.17452) appendix K.1, with the scorer `snapmax`;
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src/modeling_layers.py.
Deviations: theirs looks after every step, drops one tenth, and scores again before the
next; here an event drops as many tenths as it takes, by its own scores, and until the
next one heads grow by up to an interval. K includes sinks and local tokens (theirs has
the window of 256 on top). A head with fewer than 10 tokens drops one, not none, so that
the budget holds. Heads are then rounded to whole pages, within the budget of all.
"""

from functools import cache

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.ranking import limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.options import BaseOptions
from vllm_kvpolicy.policies.words import RECENCY, BaseAllocator


class TrimAllocator(BaseAllocator):
    """Drops the same share of every head while their mean is above the budget."""

    summary = (
        "while heads hold more than the budget on average, each drops its lowest tenth"
    )
    source = "WG-KV, arXiv 2512.17452, appendix K.1"
    ragged = True
    dynamic = True
    refuses = {"streaming": RECENCY}

    class Options(BaseOptions):
        trim_share: float = Field(
            0.1,
            ge=0.01,
            le=1,
            description="share of each head's tokens that is dropped at a time",
        )

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick at most L * H * `budget` tokens per event of `score` [E, L, H, T]."""
        held = inputs.valid if inputs.candidates is None else inputs.candidates
        must_keep = limit_must_keep(inputs.must_keep, budget)
        pinned = must_keep.sum(-1)
        others = (held & ~inputs.must_keep).sum(-1)
        total = budget * pinned[0].numel()
        for _ in range(rounds_to_nothing(score.shape[-1], self.options.trim_share)):
            is_over = (pinned + others).sum((1, 2), keepdim=True) > total
            dropped = (others.double() * self.options.trim_share).long().clamp(min=1)
            others = torch.where(is_over, (others - dropped).clamp(min=0), others)
        return Decision(top_k_mask(score, must_keep, held, pinned + others), score)


@cache
def rounds_to_nothing(num_tokens: int, share: float) -> int:
    """Return how many rounds a head of `num_tokens` tokens takes to drop them all."""
    rounds = 0
    while num_tokens > 0:
        num_tokens -= max(1, int(num_tokens * share))
        rounds += 1
    return rounds
