"""PyramidKV: layer l keeps K_l = max - l * (max - min) / (L - 1) tokens per head.

min = K / beta and max = 2K - min, so that the layers' mean is K. No layer holds more
than N = K + headroom tokens at a request's first event: if max is more, max = N and
min = 2K - N. Inside a layer every head keeps its best tokens, equally many.
Called by policies.compose.
Process: worker

Source: PyramidKV (arXiv 2406.02069) section 4.2;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/pyramidkv_press.py.
Deviations: K_l depends on the budget alone, not on the tokens held at an event (theirs
swings from event to event); it adds up to L * K, by largest remainder (theirs rounds);
there is no smallest window under which all layers keep K (must-keep tokens are floors
instead); a single layer keeps K (theirs max). A layer that must keep more than K_l, or
holds less, passes the difference on to all others evenly.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.kernels.page_quota import page_quota_ref
from vllm_kvpolicy.kernels.ranking import fill_next_best, limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs


class PyramidAllocator:
    """Gives deeper layers smaller budgets, the same at every event.

    Args:
        beta: budget over that of the last layer.
        headroom: tokens that a layer may hold beyond the budget.
    """

    needs = Needs()

    def __init__(self, beta: float = 20.0, headroom: int = 512) -> None:
        self.beta = beta
        self.headroom = headroom

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "PyramidAllocator":
        """Build from options that `registry.resolve_options` has checked."""
        return cls(options["pyramid_beta"], options["pyramid_headroom"])

    def choose(
        self,
        score: torch.Tensor,
        inputs: EventInputs,
        usage: WindowUsage | None,
        budget: int,
    ) -> Decision:
        """Pick L * H * `budget` tokens per event of `score` [E, L, H, T]."""
        num_events, num_layers, num_heads, _ = score.shape
        must_keep = limit_must_keep(inputs.must_keep, budget)
        planned = self.plan(num_layers, budget, score.device)
        total = num_layers * num_heads * budget
        quota = page_quota_ref(
            planned[:, None].expand(num_events, -1, num_heads).flatten(1),
            must_keep.sum(-1).flatten(1),
            inputs.lengths.flatten(1),
            torch.full((num_events,), total, device=score.device),
            block_size=1,
        )
        quota = quota.view(num_events, num_layers, num_heads)
        return Decision(top_k_mask(score, must_keep, inputs.valid, quota), score)

    def plan(
        self, num_layers: int, budget: int, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return K_l in whole tokens, [L] int64, falling and adding up to L * K."""
        if num_layers == 1:
            return torch.full((1,), budget, device=device)
        length = budget + self.headroom
        exact = layer_budgets(num_layers, budget, length, self.beta, device=device)
        whole = exact.floor()
        none = torch.zeros_like(exact, dtype=torch.bool)
        left = num_layers * budget - whole.long().sum()
        return whole.long() + fill_next_best(none, exact - whole, ~none, left)


def layer_budgets(
    num_layers: int,
    budget: float,
    length: int,
    beta: float,
    window: int = 0,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the formula's budgets before rounding, [L] float64 tokens.

    Args:
        num_layers: L.
        budget: K, tokens.
        length: N, tokens held.
        beta: budget over that of the last layer.
        window: tokens that kvpress' layers keep anyway: no max above N - window, and K
            for all layers where min is below it.
        device: of the result.
    """
    lowest = budget / beta
    highest = min(2 * budget - lowest, length - window)
    lowest = 2 * budget - highest
    if not length >= highest >= lowest >= window:
        highest = lowest = budget
    layer = torch.arange(num_layers, dtype=torch.float64, device=device)
    return highest - layer * ((highest - lowest) / max(num_layers - 1, 1))
