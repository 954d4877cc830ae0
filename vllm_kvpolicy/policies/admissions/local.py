"""Local attention with sinks: nothing stays behind the recent window.

Source: the baseline of WG-KV (arXiv 2512.17452) section 4, after StreamingLLM (arXiv
2309.17453). Deviations: tokens leave the window at events; heads keep a page at least.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.policies.base import EventInputs, Needs


class LocalAttention:
    """Admits no token; sinks and the window are kept in any case."""

    needs = Needs()
    threshold = 0.5

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "LocalAttention":
        """Build from options that `registry.resolve_options` has checked."""
        return cls()

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Serve any model."""

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Return [E, L, H, F] zeros; see `Admission`."""
        return torch.zeros(token.shape, device=token.device)
