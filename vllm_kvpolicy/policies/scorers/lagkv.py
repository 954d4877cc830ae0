"""LagKV: score_i = rank of (a_i(k) + a_i(v)) / 2 within i's block / tokens per block,
a(x) = softmax over the block of std over channels of (x - min) / (max - min), where min
and max are each channel's in the next block.

Source: LagKV (arXiv 2504.04704) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/lagkv_press.py.
Deviations: computed in float32; a channel that does not vary in the next block counts
as zero (theirs divides by zero). Blocks start after the sinks, which are the leading
run of must-keep tokens; what is pinned lies before all blocks.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.ranking import leading_run, ranks_within
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import MOST_TOKENS, BaseOptions
from vllm_kvpolicy.policies.words import BaseScorer


class LagKVScorer(BaseScorer):
    """Scores a token by how far its channels spread, seen from the next block.

    Sinks, the last block and the tokens after it have no next block: they score 1.
    Where fewer than two blocks are held, later tokens score higher.
    """

    summary = "keys and values with the largest spread relative to the next block"
    source = "LagKV, arXiv 2504.04704"

    class Options(BaseOptions):
        lag: int = Field(128, ge=2, le=MOST_TOKENS, description="tokens per block")
        cross: bool = Field(
            False,
            description="compare scores across blocks instead of ranking within each "
            "block",
        )

    needs = Needs(keys=True, values=True)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32 in [0, 1]."""
        sinks = leading_run(inputs.must_keep).sum(-1, keepdim=True)
        token = torch.arange(inputs.must_keep.shape[-1], device=sinks.device)
        age, held = token - sinks, inputs.lengths[..., None] - sinks
        num_blocks = held // self.options.lag
        keys, values = inputs.given("keys"), inputs.given("values")
        index = (token + sinks).clamp(max=len(token) - 1)
        pair_bytes = 4 * keys[0, 0].numel() * 4  # four float32 copies at a time
        score = map_pairs(self._score_blocks, pair_bytes, keys, values, index)
        score = score.gather(-1, age.clamp(min=0))
        has_next = (age >= 0) & (age < (num_blocks - 1) * self.options.lag)
        ramp = torch.where(age >= 0, age / held, 1.0)
        return torch.where(num_blocks < 2, ramp, torch.where(has_next, score, 1.0))

    def _score_blocks(self, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
        """Score [n, H, T] the tokens in the order of `index`, zero in the last block.

        Args:
            keys, values: [n, H, T, D].
            index: [n, H, T] int64, tokens from the first block on.
        """
        num_tokens, lag = index.shape[-1], self.options.lag
        num_blocks = num_tokens // lag
        if num_blocks < 2:
            return torch.zeros(index.shape, device=keys.device)
        index = index[..., : num_blocks * lag, None]
        score = (self._spread(keys, index) + self._spread(values, index)) / 2
        if not self.options.cross:
            rows = score.flatten(0, 2)
            rank = ranks_within(rows, torch.zeros_like(rows, dtype=torch.int64))
            score = (lag - 1 - rank).view_as(score) / lag
        return F.pad(score.flatten(2), (0, num_tokens - (num_blocks - 1) * lag))

    def _spread(self, states: Tensor, index: Tensor) -> Tensor:
        """Compute a(x) [n, H, blocks - 1, lag] of states [n, H, T, D]."""
        blocks = torch.take_along_dim(states, index, 2).float()
        blocks = blocks.unflatten(2, (-1, self.options.lag))
        low = blocks[:, :, 1:].amin(3, keepdim=True)
        width = blocks[:, :, 1:].amax(3, keepdim=True) - low
        relative = torch.where(width > 0, (blocks[:, :, :-1] - low) / width, 0.0)
        return relative.std(-1).softmax(-1)
