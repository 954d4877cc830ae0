"""Keeps every token where it is: what a selection alone chooses from.

Source: this project. Deviations: none.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs


class KeepAll:
    """Keeps every token, in time order."""

    needs = Needs()
    dynamic = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "KeepAll":
        """Build from options that `registry.resolve_options` has checked."""
        return cls()

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Serve any model."""

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep all valid tokens, whatever the budget; newer ones score higher."""
        keep = inputs.valid
        position = torch.arange(keep.shape[-1], device=keep.device)
        return Decision(keep, position.float().expand(keep.shape))
