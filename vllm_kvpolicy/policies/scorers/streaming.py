"""StreamingLLM: score_i = i, so the sinks and the newest tokens stay.

Source: StreamingLLM (arXiv 2309.17453) section 3.2;
https://github.com/mit-han-lab/streaming-llm/blob/main/streaming_llm/kv_cache.py.
Deviations: keys keep the position they were written at (theirs are re-rotated to their
place in the cache); the sinks are part of the must-keep set that all policies share.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.words import BaseScorer


class StreamingScorer(BaseScorer):
    """Scores a token by its place in time."""

    summary = "sinks and the newest tokens"
    source = "StreamingLLM, arXiv 2309.17453"
    reads_heads = False

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32: the token's index (exact below 2^24)."""
        shape = inputs.must_keep.shape
        index = torch.arange(shape[-1], device=inputs.lengths.device)
        return index.float().expand(shape)
