"""Keeps every token where it is: what a selection alone chooses from.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs


class KeepAll:
    """Keeps every token, in time order."""

    needs = Needs()
    dynamic = False

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Serve any model."""

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep all valid tokens, whatever the budget; newer ones score higher."""
        keep = inputs.valid
        position = torch.arange(keep.shape[-1], device=keep.device)
        return Decision(keep, position.float().expand(keep.shape))

    def arrange(
        self, sources: torch.Tensor, heads: torch.Tensor, seeds: torch.Tensor
    ) -> torch.Tensor:
        """Keep survivors in time order: `sources` [E, M] int64 as they are."""
        return sources

    def arrange_pages(self, pages: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """Leave `pages` [E, C] int64 where they are."""
        return pages
