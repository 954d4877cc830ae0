"""Local attention with sinks: nothing older than the recent window stays.

Source: the baseline of WG-KV (arXiv 2512.17452) section 4, after StreamingLLM (arXiv
2309.17453). Deviations: tokens leave the window at events; heads keep a page at least.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.names import ALLOCATORS
from vllm_kvpolicy.policies.words import BaseAdmission

_NO_CHOICE = "`local` keeps only sinks and the recent window: nothing is left to choose"


class LocalAttention(BaseAdmission):
    """Admits no token; sinks and the window are always kept."""

    summary = "only sinks and the recent window are kept; a baseline"
    source = "WG-KV, arXiv 2512.17452"
    refuses = dict.fromkeys(ALLOCATORS, _NO_CHOICE)

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        return torch.zeros(token.shape, device=token.device)
