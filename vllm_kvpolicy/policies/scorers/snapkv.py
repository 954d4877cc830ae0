"""SnapKV: score_i = mean over group and window of softmax_i(q_w . k_i * scale), pooled.

Source: SnapKV (arXiv 2404.14469) section 4.2;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/snapkv_press.py.
Deviations: window of 32 queries (kvpress 64), each at its own position; average pooling
as in kvpress (the original takes a maximum); the newest W tokens get the row's highest
score (kvpress takes the maximum over all heads and requests, in later versions plus 1).
"""

from torch import Tensor

from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    mean_over_group,
    measured,
    pooled_usage,
)
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import PoolOptions
from vllm_kvpolicy.policies.words import BaseScorer


class SnapKVScorer(BaseScorer):
    """Scores a token by the window's attention, smoothed over its neighbours."""

    summary = "pooled attention of the newest queries"
    source = "SnapKV, arXiv 2404.14469"
    reads_heads = False
    query_window = "window"
    needs = Needs(usage=True, keys=True)
    Options = PoolOptions

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32, zero on padding."""
        usage = measured(usage)
        mean = mean_over_group(usage.mean, inputs.lengths.shape[2])
        return pooled_usage(mean, usage.lengths, usage.window, self.options.pool_kernel)
