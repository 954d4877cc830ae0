"""DuoAttention: some KV heads keep everything, the others sinks and the recent window.

Source: DuoAttention, arXiv 2410.10819, section 2; a baseline of WG-KV (arXiv
2512.17452). Deviations: tokens leave the window at events; equal heads are split in
model order, not at random.
"""

import torch

from vllm_kvpolicy.policies.admissions.duo.files import Pattern, load
from vllm_kvpolicy.policies.admitted import BaseAdmission
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.ranks import HeadShard


def from_options(duo_pattern: str, duo_sparsity: float) -> "RetrievalHeads":
    """Build the admission from the files of a pattern.

    Raises:
        ValueError: the files are missing, broken, or hold something else.
    """
    return RetrievalHeads(load(duo_pattern), duo_sparsity)


class RetrievalHeads(BaseAdmission):
    """Admits every token to the heads that profit most, and none to the others.

    Args:
        pattern: how much each head profits from a full cache.
        sparsity: share of the heads, those that profit least, that get no token.
    """

    def __init__(self, pattern: Pattern, sparsity: float) -> None:
        self.pattern = pattern
        self.keeps = pattern.retrieving(sparsity).float()

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the pattern fits the model; see `Pattern.check_shape`."""
        self.pattern.check_shape(num_layers, num_kv_heads)

    def take_heads(self, shard: HeadShard) -> None:
        """Take the rank's heads; which ones retrieve, the whole model decides."""
        self.keeps = shard.kv_heads(self.keeps, 1)

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Return [E, L, H, F], 1 in heads that keep everything; see `BaseAdmission`."""
        self.keeps = self.keeps.to(token.device)
        return self.keeps[..., None].expand(token.shape)
