"""Random: score_i = hash(seed, end, layer, head, i), a control for other scorers.

Source: this project. Deviations: none.
"""

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.options import BaseOptions
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.words import BaseScorer


class RandomScorer(BaseScorer):
    """Draws a score for each token, anew at each event, the same in every run."""

    summary = "random scores; a control"
    source = "control, this project"
    reads_heads = False

    class Options(BaseOptions):
        seed: int = Field(
            0, ge=0, le=2**32 - 1, description="random seed of the scores"
        )

    first_head = 0

    def take_heads(self, shard: HeadShard) -> None:
        """Draw what the heads would get on one rank."""
        self.first_head = shard.first_kv_head

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32, uniform in [0, 1)."""
        num_layers, num_heads, num_tokens = inputs.must_keep.shape[1:]
        device = inputs.lengths.device
        layer = torch.arange(num_layers, device=device)[:, None, None]
        head = self.first_head + torch.arange(num_heads, device=device)[:, None]
        token = torch.arange(num_tokens, device=device)
        event = mix(mix(inputs.end) ^ self.options.seed)[:, None, None, None]
        draw = mix(mix(mix(event ^ layer) ^ head) ^ token)
        # float32 holds 24 bits exactly.
        return (draw >> 8).float() / 2**24


def mix(values: Tensor) -> Tensor:
    """Hash int64 to 0..2^32-1: xor-shift and multiply, a bijection on 32-bit values.

    Source: https://nullprogram.com/blog/2018/07/31/ (lowbias32).
    """
    mask = 2**32 - 1
    values = (values ^ (values >> 32)) & mask
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & mask
    values = ((values ^ (values >> 15)) * 0x846CA68B) & mask
    return values ^ (values >> 16)
