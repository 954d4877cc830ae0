"""Q-Filters: score_i = -f . k_i, f a direction of each layer and KV head.

Source: Q-Filters (arXiv 2503.02812) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/qfilter_press.py.
Deviations: none. As in the published filters, f points away from the queries.
"""

from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.paged_reductions import paged_projections
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.calibration import (
    DESCRIPTION,
    CalibratedScorer,
    Calibration,
)
from vllm_kvpolicy.policies.options import BaseOptions, FilePath
from vllm_kvpolicy.policies.ranks import HeadShard


class QFilterScorer(CalibratedScorer):
    """Scores a token by how far its key reaches in the direction of typical queries."""

    summary = "keys that point in the direction of typical queries"
    source = "Q-Filters, arXiv 2503.02812"
    kind = "qfilter"

    class Options(BaseOptions):
        qfilter_calibration: FilePath = Field(description=DESCRIPTION.format("qfilter"))

    needs = Needs(keys=True)

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.filters = calibration.tensors["filters"]

    def take_heads(self, shard: HeadShard) -> None:
        self.filters = shard.kv_heads(self.filters, 1)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        keys = inputs.paged("keys")
        self.filters = self.filters.to(keys.device)  # moves once
        filters = self.filters.expand(*keys.shape[:3], -1)
        return -paged_projections(keys, inputs.lengths, filters)
