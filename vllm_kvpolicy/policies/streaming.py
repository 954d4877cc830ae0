"""StreamingLLM: score_i = i, so the sinks and the newest tokens stay.

Called by policies.compose.
Process: worker

Source: StreamingLLM (arXiv 2309.17453) section 3.2;
https://github.com/mit-han-lab/streaming-llm/blob/main/streaming_llm/kv_cache.py.
Deviations: keys keep the position they were written at (theirs are re-rotated to their
place in the cache); the sinks are part of the must-keep set that all policies share.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs


class StreamingScorer:
    """Scores a token by its place in time."""

    window_tokens = 0
    needs_keys = False

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "StreamingScorer":
        """Build; reads no option."""
        return cls()

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score [E, L, H, T] float32: the token's index (exact below 2^24)."""
        num_events, num_tokens = inputs.must_keep.shape
        index = torch.arange(
            num_tokens, device=inputs.must_keep.device, dtype=torch.float32
        )
        return index.expand(
            num_events, inputs.num_layers, inputs.num_kv_heads, num_tokens
        )
