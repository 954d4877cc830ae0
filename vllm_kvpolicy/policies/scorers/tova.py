"""TOVA: score_i = mean over all query heads of softmax_i(q_last . k_i * scale).

Source: TOVA (arXiv 2401.06104) section 3.2, layer-wise variant;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/tova_press.py.
Deviations: the newest token gets the highest score of its row, so that it stays even
if nothing is set to stay (as kvpress, which adds 1 to it in later versions); selection
once per event instead of after every token. The mean goes by cache index, as kvpress'
does: under an allocator that lets the heads of a layer keep different tokens (ams), one
index names different tokens in different heads.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.window_usage import WindowUsage, measured
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.ranks import Ranks
from vllm_kvpolicy.policies.words import BaseScorer


def cross_head_mean(per_query_head: Tensor, ranks: Ranks) -> Tensor:
    """Average a layer's query heads: float32 [E, L, Hq, T] to float32 [E, L, 1, T]."""
    return ranks.mean(per_query_head.mean(2, keepdim=True))


class TovaScorer(BaseScorer):
    """Scores a token by the newest query's attention; the same for all KV heads."""

    summary = "attention of the newest query, averaged over all heads"
    source = "TOVA, arXiv 2401.06104"
    reads_heads = False
    query_window = 1

    needs = Needs(usage=True, keys=True)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32; heads differ only in where they end."""
        usage = measured(usage)
        score = cross_head_mean(usage.last, inputs.ranks)
        position = torch.arange(score.shape[-1], device=score.device)
        is_last = position == inputs.lengths[..., None] - 1
        return torch.where(is_last, score.amax(-1, keepdim=True), score)
