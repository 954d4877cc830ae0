"""Stratified control: each block of B tokens keeps equally many, its best ones.

Shows what quotas achieve without attention mass: AMS with blocks for segments.

Source: this project. Deviations: none.
"""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.ranking import limit_must_keep
from vllm_kvpolicy.kernels.segment_quota import pick_by_quota, round_robin
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.options import BaseOptions, Tokens
from vllm_kvpolicy.policies.words import RECENCY, BaseAllocator


class StratifiedAllocator(BaseAllocator):
    """Shares each head's budget evenly among blocks by index, oldest first."""

    summary = "blocks of equal length with equal quotas; a control"
    source = "control, this project"
    reads_heads = False
    refuses = {"streaming": RECENCY}

    class Options(BaseOptions):
        strat_block: Tokens = Field(256, description="tokens per block")

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        must_keep = limit_must_keep(inputs.must_keep, budget).flatten(0, 2)
        is_open = inputs.valid.flatten(0, 2) & ~must_keep
        num_tokens, size = score.shape[-1], self.options.strat_block
        num_blocks = -(-num_tokens // size)
        block = torch.arange(num_tokens, device=score.device) // size
        block = block.expand(is_open.shape)
        capacity = torch.zeros_like(block[:, :num_blocks])
        capacity = capacity.scatter_add(-1, block, is_open.long())
        room = budget - must_keep.sum(-1, keepdim=True)
        picked = pick_by_quota(
            score.reshape(is_open.shape),
            block.masked_fill(~is_open, num_blocks),
            round_robin(capacity, room),
        )
        return Decision((picked | must_keep).view(score.shape), score)
