"""TriAttention: score_i = max_g of the z-score of s_gi over the tokens i,

s_gi = Re sum_f w_gf conj(k_if) + sum_f e_gf |k_if|, f over the channel pairs of a
cached key, read as complex numbers; e_gf = c (A_gf - |Q_gf|);
w_gf = c Q_gf mean_d exp(i o_f (t + d)), d = 1, 2, 4 .. 65536, t the next position.
Q and A are mean and mean length of the pre-RoPE queries, from a calibration file; o and
c frequencies and scaling of RoPE, whose second factor c is in the cached keys.

Source: TriAttention (arXiv 2604.04921), scores per layer and KV head;
https://github.com/WeianMao/triattention/blob/c3744ee6a50522a1559a577f85aef2b165a344f2/triattention/methods/pruning_utils.py.
Deviations: the mean over d is taken of the rotations, once per event, and keys stay
rotated (theirs turns keys back and scores them for each d); phases in float64 (theirs
are float32 up to 70000 rad); no noise on ties. Mean and deviation are those of all
tokens but the leading run of must-keep tokens (theirs: but the prompt).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.paged_reductions import paged_pair_projections
from vllm_kvpolicy.kernels.ranking import leading_run
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.calibration import (
    DESCRIPTION,
    CalibratedScorer,
    Calibration,
)
from vllm_kvpolicy.policies.options import BaseOptions, FilePath
from vllm_kvpolicy.policies.ranks import HeadShard

NUM_DISTANCES = 17  # d = 1, 2, 4 .. 65536
MIN_DEVIATION = 1e-6


class TriAttentionScorer(CalibratedScorer):
    """Scores a token by the attention expected from future queries."""

    summary = "attention expected from the mean query at future positions"
    source = "TriAttention, arXiv 2604.04921"
    rotates = True
    kind = "triattention"

    class Options(BaseOptions):
        triattention_calibration: FilePath = Field(
            description=DESCRIPTION.format("triattention")
        )
        tri_aggregate: Literal["max", "mean"] = Field(
            "max", description="how the query heads of a KV head are combined"
        )

    needs = Needs(keys=True, rope=True, halves=True)

    def __init__(self, calibration: Calibration, tri_aggregate: str) -> None:
        self.calibration = calibration
        self.aggregate = tri_aggregate
        stored = calibration.tensors
        self.query = torch.complex(stored["query_real"], stored["query_imag"])
        self.by_length = stored["query_abs"] - self.query.abs()

    def take_heads(self, shard: HeadShard) -> None:
        self.query = shard.query_heads(self.query, 1)
        self.by_length = shard.query_heads(self.by_length, 1)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        counted = inputs.valid & ~leading_run(inputs.must_keep)
        grouped = self.per_query_head(inputs).unflatten(2, (counted.shape[2], -1))
        z_score = standardised(grouped, counted[:, :, :, None])
        return z_score.amax(3) if self.aggregate == "max" else z_score.mean(3)

    def per_query_head(self, inputs: EventInputs) -> Tensor:
        """Return s [E, L, Hq, T] float32, zero on padding."""
        keys, rope = inputs.paged("keys"), inputs.given("rope")
        # Moves to the keys' device once.
        self.query = self.query.to(keys.device)
        self.by_length = self.by_length.to(keys.device)
        scaling = rope.scaling
        if isinstance(scaling, Tensor):
            scaling = rope.by_layer(scaling)[:, None]
        rotation = rope.by_layer(mean_rotation(inputs.end, rope))[:, :, None]
        turned = scaling * self.query * rotation
        by_length = (scaling * self.by_length).float()
        return paged_pair_projections(
            keys,
            inputs.lengths,
            torch.cat([turned.real, turned.imag], -1).float(),
            by_length.expand(len(turned), *by_length.shape),
        )


def mean_rotation(end: Tensor, rope: Rope) -> Tensor:
    """Average the rotations at the distances d from `end`, the next position.

    Without scaling; [E, D/2] complex128, of kinds [E, K, D/2].
    """
    distance = 2 ** torch.arange(NUM_DISTANCES, device=end.device)
    angle = rope.angles(end[:, None] + distance)
    return torch.polar(torch.ones_like(angle), angle).mean(1)


def standardised(score: Tensor, counted: Tensor) -> Tensor:
    """Shift and scale rows [..., T] float32 to mean 0 and standard deviation 1.

    Of the counted tokens; smaller deviations count as `MIN_DEVIATION`.
    """
    count = counted.sum(-1, keepdim=True).clamp_min(1)
    score = score.double()
    mean = torch.where(counted, score, 0.0).sum(-1, keepdim=True) / count
    off = score - mean
    variance = torch.where(counted, off, 0.0).square().sum(-1, keepdim=True) / count
    return (off / variance.sqrt().clamp_min(MIN_DEVIATION)).float()
