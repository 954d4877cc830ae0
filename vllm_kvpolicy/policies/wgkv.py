"""WG-KV: g = sigmoid(MLP(norm(key before RoPE), norm(key))), per layer and KV head.

Called by policies.admitted.
Process: worker

Source: WG-KV (arXiv 2512.17452) section 3.2; see kernels.paged_gates and docs/wgkv.md.
Deviations: gates are evaluated at events, from cached keys and their positions.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_kvpolicy.admission.wgkv_files import load
from vllm_kvpolicy.admission.wgkv_gates import Gates
from vllm_kvpolicy.kernels.paged_gates import paged_gates
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights
from vllm_kvpolicy.policies.base import EventInputs, Needs


class WriteGates:
    """The trained gates of a model.

    Args:
        gates: as read from a file.
        threshold: the paper's tau; None for the file's.
    """

    needs = Needs(keys=True, rope=True)

    def __init__(self, gates: Gates, threshold: float | None = None) -> None:
        self.file = gates
        self.threshold = gates.threshold if threshold is None else threshold
        self.weights = GateWeights(**gates.stacked())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "WriteGates":
        """Build from options that `registry.resolve_options` has checked.

        Raises:
            ValueError: the file is missing, broken, or holds something else.
        """
        return cls(load(options["wgkv_gates"]), options["wgkv_threshold"])

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the gates fit the model; see `Gates.check_shape`."""
        self.file.check_shape(num_layers, num_kv_heads, head_dim)

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Evaluate [E, L, H, F] gates of held tokens; see `Admission`."""
        keys = inputs.paged("keys")
        # Weights move to the device, and to the dtype of the model, once.
        self.weights = self.weights.to(keys.device, keys.pools[0].dtype)
        # Nothing has been dropped since the last event: positions count to the end.
        behind = token - inputs.lengths[..., None]
        positions = inputs.end[:, None, None, None] + behind
        rope = inputs.given("rope")
        return paged_gates(keys, token, positions, rope, self.weights)
