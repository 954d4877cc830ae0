"""WG-KV: g = sigmoid(MLP(norm(key before RoPE), norm(key))), per layer and KV head.

Called by policies.admitted.
Process: worker

Source: WG-KV (arXiv 2512.17452) section 3.2; see kernels.wgkv_gate and docs/wgkv.md.
Deviations: gates are evaluated from cached keys and their positions, at events; where
attention has to be exact, while tokens are computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm_kvpolicy.admission.wgkv_files import load
from vllm_kvpolicy.admission.wgkv_gates import Gates
from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate_cached
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.rope import Rope


class WriteGates:
    """The trained gates of a model.

    Args:
        gates: as read from a file.
        threshold: the paper's tau; None for the file's.
        exact: tokens decide while they are computed; this is a `Decider` then.
    """

    shift = 0

    def __init__(
        self, gates: Gates, threshold: float | None = None, exact: bool = False
    ) -> None:
        self.needs = Needs(keys=not exact, rope=True, until=exact, exact=exact)
        self.file = gates
        self.window = gates.window
        self.threshold = gates.threshold if threshold is None else threshold
        self.weights = GateWeights(**gates.stacked())

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "WriteGates":
        """Build from options that `registry.resolve_options` has checked.

        Raises:
            ValueError: the file is missing, broken, or holds something else.
        """
        gates = load(options["wgkv_gates"])
        return cls(gates, options["wgkv_threshold"], options["exact"])

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the gates fit the model; see `Gates.check_shape`."""
        self.file.check_shape(num_layers, num_kv_heads, head_dim)

    def attach(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        vllm_config: Any,
        rope: Rope | None,
    ) -> None:
        """Take what gates are evaluated with; see `Decider`."""
        self._rope = rope
        first = next(model.parameters())
        self.weights = self.weights.to(first.device, vllm_config.model_config.dtype)

    def keeps(
        self, layer: int, key: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return [T, H] bool of the tokens themselves; see `Decider`."""
        assert self._rope is not None  # `needs` says so
        weights = self.weights.layer(layer)
        gates = gate_cached(key.transpose(0, 1), positions, self._rope, weights)
        return self.threshold < gates.T

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Evaluate [E, L, H, F] gates of held tokens; see `Admission`."""
        keys = inputs.paged("keys")
        # Weights move to the device, and to the dtype of the model, once.
        self.weights = self.weights.to(keys.device, keys.pools[0].dtype)
        num_rows, size = token[..., 0].numel(), keys.shape[-1]
        step = max(1, CHUNK_BYTES // (8 * num_rows * size))
        parts = [self._some(inputs, part) for part in token.split(step, dim=-1)]
        return torch.cat(parts, dim=-1)

    def _some(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Do as `gates` for as many tokens as may be copied at a time."""
        keys = inputs.paged("keys").at(token)
        # Nothing has been dropped since the last event: positions count to the end.
        length = inputs.lengths[..., None]
        positions = inputs.end[:, None, None, None] - length + token
        # [L, H, E * F], tokens of all requests in one row.
        rows, places = (
            part.permute(1, 2, 0, *range(3, part.ndim)).flatten(2, 3)
            for part in (keys, positions)
        )
        gates = gate_cached(rows, places, inputs.given("rope"), self.weights)
        return gates.unflatten(2, (len(keys), -1)).permute(2, 0, 1, 3)
