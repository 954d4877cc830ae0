"""Knorm: score_i = -|k_i|, the length of the cached key.

Source: L2 norm-based KV cache compression (arXiv 2406.11430) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/knorm_press.py.
Deviations: computed in float32; all layers take part (the paper spares the first two).
"""

from torch import Tensor

from vllm_kvpolicy.kernels.paged_reductions import paged_norms
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.words import BaseScorer


class KnormScorer(BaseScorer):
    """Scores a token higher the shorter its key."""

    summary = "keys with the smallest norm"
    source = "L2 norm, arXiv 2406.11430"

    needs = Needs(keys=True)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32, never positive."""
        return -paged_norms(inputs.paged("keys"), inputs.lengths)
