"""Random: score_i = hash(seed, end, layer, head, i), a control for other scorers.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.mixing import mix
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.scorers.base import BaseScorer


class RandomScorer(BaseScorer):
    """Draws a score for each token, anew at each event, the same in every run.

    Args:
        seed: a different one draws different scores.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.first_head = 0

    def take_heads(self, shard: HeadShard) -> None:
        """Draw what the heads would get on one rank; see `BaseScorer`."""
        self.first_head = shard.first_kv_head

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score [E, L, H, T] float32, uniform in [0, 1)."""
        num_layers, num_heads, num_tokens = inputs.must_keep.shape[1:]
        device = inputs.lengths.device
        layer = torch.arange(num_layers, device=device)[:, None, None]
        head = self.first_head + torch.arange(num_heads, device=device)[:, None]
        token = torch.arange(num_tokens, device=device)
        event = mix(mix(inputs.end) ^ self.seed)[:, None, None, None]
        draw = mix(mix(mix(event ^ layer) ^ head) ^ token)
        # float32 holds 24 bits exactly.
        return (draw >> 8).float() / 2**24
