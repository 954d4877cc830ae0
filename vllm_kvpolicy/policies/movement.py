"""Test policies that drop nothing: `identity` and `holes` only move tokens.

Called by attention.compaction in tests. Output must stay that of stock vLLM, token for
token, although nearly every token changes its place.
Process: worker

Source: this project. Deviations: none.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs


class MovementPolicy:
    """Keeps every token and shuffles the survivors of each (event, layer, head)."""

    window_tokens = 0
    needs_keys = False
    has_credit = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "MovementPolicy":
        """Build; reads no option."""
        return cls()

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep all valid tokens, whatever the budget; newer ones score higher."""
        num_events, num_tokens = inputs.must_keep.shape
        position = torch.arange(num_tokens, device=inputs.must_keep.device)
        valid = position < inputs.lengths[:, None]
        shape = (num_events, inputs.num_layers, inputs.num_kv_heads, num_tokens)
        keep = valid[:, None, None].expand(shape)
        return Decision(keep, position.float().expand(shape))

    def arrange(self, sources: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """Shuffle each row; a function of (seed, layer, head, row) alone.

        Args:
            sources: [E, L, H, C] int64; negative entries are padding on the right.
            seeds: [E] int64.

        Returns:
            [E, L, H, C] int64: the same entries, shuffled, padding still on the right.
        """
        num_layers, num_heads, num_entries = sources.shape[1:]
        layer = torch.arange(num_layers, device=sources.device)[:, None, None]
        head = torch.arange(num_heads, device=sources.device)[:, None]
        entry = torch.arange(num_entries, device=sources.device)
        draw = _mix(_mix(_mix(_mix(seeds)[:, None, None, None] ^ layer) ^ head) ^ entry)
        # Draws are below 2^32: padding sorts behind, in its own order.
        draw = torch.where(sources < 0, 2**32 + entry, draw)
        return sources.gather(-1, draw.argsort(dim=-1, stable=True))


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Hash int64 to 0..2^32-1: xor-shift and multiply, a bijection on 32-bit values.

    Source of the constants: https://nullprogram.com/blog/2018/07/31/ (lowbias32).
    """
    mask = 2**32 - 1
    values = (values ^ (values >> 32)) & mask
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & mask
    values = ((values ^ (values >> 15)) * 0x846CA68B) & mask
    return values ^ (values >> 16)
