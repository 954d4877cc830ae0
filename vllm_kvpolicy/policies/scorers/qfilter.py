"""Q-Filters: score_i = -f . k_i, f a direction of each layer and KV head.

Source: Q-Filters (arXiv 2503.02812) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/qfilter_press.py.
Deviations: none. As in the published filters, f points away from the queries.
"""

import torch

from vllm_kvpolicy.kernels.paged_reductions import paged_projections
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.calibration import Calibration, load
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.scorers.base import BaseScorer


def from_options(qfilter_calibration: str) -> "QFilterScorer":
    """Build the scorer from its calibration file.

    Raises:
        ValueError: the file is missing, broken, or holds something else.
    """
    return QFilterScorer(load(qfilter_calibration, "qfilter"))


class QFilterScorer(BaseScorer):
    """Scores a token by how far its key reaches in the direction of typical queries.

    Args:
        calibration: of kind "qfilter".
    """

    needs = Needs(keys=True)

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.filters = calibration.tensors["filters"]

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the calibration fits the model; see `BaseScorer`."""
        self.calibration.check_model(num_layers, num_heads, num_kv_heads, head_dim)

    def take_heads(self, shard: HeadShard) -> None:
        """Take the filters of the rank's KV heads; see `BaseScorer`."""
        self.filters = shard.kv_heads(self.filters, 1)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score [E, L, H, T] float32."""
        keys = inputs.paged("keys")
        self.filters = self.filters.to(keys.device)  # moves once
        filters = self.filters.expand(*keys.shape[:3], -1)
        return -paged_projections(keys, inputs.lengths, filters)
