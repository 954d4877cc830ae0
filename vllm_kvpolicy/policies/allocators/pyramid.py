"""PyramidKV: layer l keeps K_l = max - l * (max - min) / (L - 1) tokens per head.

min = K / beta and max = 2K - min, so that the layers' mean is K. No layer gets more
than N tokens, N = K + headroom, or what heads hold on average before the event if that
is less: if max is more, max = N and min = 2K - N. So at a first event no layer is asked
for more than it holds. Inside a layer every head keeps its best tokens, equally many.

Source: PyramidKV (arXiv 2406.02069) section 4.2;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/pyramidkv_press.py.
Deviations: of the tokens held at an event no more than K + headroom count (theirs
swings with the length of prompts); K_l adds up to L * K, by largest remainder (theirs
rounds);
there is no smallest window under which all layers keep K (must-keep tokens are floors
instead); a single layer keeps K (theirs max). A layer that must keep more than K_l, or
holds less, passes the difference on to all others evenly.
"""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.assign_pages import page_quota
from vllm_kvpolicy.kernels.ranking import fill_next_best, limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.options import MOST_TOKENS, BaseOptions
from vllm_kvpolicy.policies.words import BaseAllocator


class PyramidAllocator(BaseAllocator):
    """Gives deeper layers smaller budgets; they depend only on the tokens held."""

    summary = "smaller budgets for deeper layers"
    source = "PyramidKV, arXiv 2406.02069"
    ragged = True

    class Options(BaseOptions):
        pyramid_beta: float = Field(
            20.0,
            ge=1,
            le=1_000_000,
            description="the budget divided by the last layer's budget",
        )
        pyramid_headroom: int = Field(
            512,
            ge=0,
            le=MOST_TOKENS,
            description="tokens above the budget that the first layer may hold, if it "
            "has that many",
        )

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        """Pick L * H * `budget` tokens per event of `score` [E, L, H, T]."""
        num_events, num_layers, num_heads, _ = score.shape
        must_keep = limit_must_keep(inputs.must_keep, budget)
        held = inputs.lengths.flatten(1).sum(-1) // (num_layers * num_heads)
        planned = self.plan(num_layers, budget, held)
        total = num_layers * num_heads * budget
        quota = page_quota(
            planned[..., None].expand(-1, -1, num_heads).flatten(1),
            must_keep.sum(-1).flatten(1),
            inputs.lengths.flatten(1),
            torch.full((num_events,), total, device=score.device),
            block_size=1,
        )
        quota = quota.view(num_events, num_layers, num_heads)
        return Decision(top_k_mask(score, must_keep, inputs.valid, quota), score)

    def plan(self, num_layers: int, budget: int, held: Tensor) -> Tensor:
        """Return K_l in whole tokens, [E, L] int64, falling and adding up to L * K.

        Heads hold `held` [E] int64 tokens on average, at least K.
        """
        if num_layers == 1:
            return torch.full_like(held, budget)[:, None]
        length = held.clamp(max=budget + self.options.pyramid_headroom)
        exact = layer_budgets(num_layers, budget, length, self.options.pyramid_beta)
        whole = exact.floor()
        none = torch.zeros_like(exact, dtype=torch.bool)
        left = num_layers * budget - whole.long().sum(-1)
        return whole.long() + fill_next_best(none, exact - whole, ~none, left)


def layer_budgets(
    num_layers: int, budget: float, length: Tensor, beta: float, window: int = 0
) -> Tensor:
    """Return the formula's budgets before rounding, [E, L] float64 tokens.

    Args:
        length: [E] int64, N, tokens held.
        beta: budget over that of the last layer.
        window: tokens that kvpress' layers keep anyway: no max above N - window, and K
            for all layers where min is below it.
    """
    highest = (length.double() - window).clamp(max=2 * budget - budget / beta)
    lowest = 2 * budget - highest
    fits = (highest >= lowest) & (lowest >= window)
    highest = torch.where(fits, highest, budget)[:, None]
    lowest = torch.where(fits, lowest, budget)[:, None]
    layer = torch.arange(num_layers, dtype=torch.float64, device=length.device)
    return highest - layer * ((highest - lowest) / max(num_layers - 1, 1))
