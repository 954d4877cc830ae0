"""Local attention with sinks: nothing older than the recent window stays.

Source: the baseline of WG-KV (arXiv 2512.17452) section 4, after StreamingLLM (arXiv
2309.17453). Deviations: tokens leave the window at events; heads keep a page at least.
"""

import torch

from vllm_kvpolicy.policies.admitted import BaseAdmission
from vllm_kvpolicy.policies.base import EventInputs


class LocalAttention(BaseAdmission):
    """Admits no token; sinks and the window are always kept."""

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Return [E, L, H, F] zeros; see `BaseAdmission`."""
        return torch.zeros(token.shape, device=token.device)
