"""KeyDiff: score_i = -cos(k_i, sum_j k_j / |k_j|), j over the tokens held.

Called by policies.compose.
Process: worker

Source: KeyDiff (arXiv 2504.15364) section 3;
https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/keydiff_press.py.
Deviations: computed in float32, the sum over tokens in float64.
"""

import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.scorer import BaseScorer


class KeyDiffScorer(BaseScorer):
    """Scores a token higher the less its key resembles the other keys of its head."""

    needs = Needs(keys=True)

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> torch.Tensor:
        """Score [E, L, H, T] float32 in [-1, 1]."""
        keys, valid = inputs.given("keys"), inputs.valid
        pair_bytes = 4 * keys[0, 0].numel() * 4  # four float32 copies at a time
        return -map_pairs(_likeness, pair_bytes, keys, valid)


def _likeness(keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return [n, H, T], the cosine of keys [n, H, T, D] with the sum of valid ones."""
    unit = F.normalize(keys.float(), dim=-1)
    held = torch.where(valid[..., None], unit, 0.0)
    mean = F.normalize(held.sum(2, keepdim=True, dtype=torch.float64), dim=-1)
    return (unit * mean.float()).sum(-1)
