"""KeyDiff: score_i = -cos(k_i, sum_j k_j / |k_j|), j over the tokens held.

Source: KeyDiff (arXiv 2504.15364) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/keydiff_press.py.
Deviations: computed in float32, the sum over tokens in float64.
"""

from torch import Tensor

from vllm_kvpolicy.kernels.paged_reductions import paged_cosines
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.words import BaseScorer


class KeyDiffScorer(BaseScorer):
    """Scores a token higher the less its key resembles the other keys of its head."""

    summary = "keys least similar to the mean key"
    source = "KeyDiff, arXiv 2504.15364"

    needs = Needs(keys=True)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32 in [-1, 1]."""
        return -paged_cosines(inputs.paged("keys"), inputs.lengths)
