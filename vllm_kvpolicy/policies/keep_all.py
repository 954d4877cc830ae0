"""Keeps every token where it is: what a selection alone chooses from.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs, Policy


class KeepAll(Policy):
    """Keeps every token, in time order."""

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep all valid tokens, whatever the budget; newer ones score higher."""
        keep = inputs.valid
        position = torch.arange(keep.shape[-1], device=keep.device)
        return Decision(keep, position.float().expand(keep.shape))
