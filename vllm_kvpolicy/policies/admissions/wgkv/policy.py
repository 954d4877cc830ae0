"""WG-KV: g = sigmoid(MLP(norm(key before RoPE), norm(key))), per layer and KV head.

Source: WG-KV (arXiv 2512.17452) section 3.2; see kernels.wgkv_gate and docs/wgkv.md.
Deviations: gates are evaluated from cached keys and their positions, at events; where
attention has to be exact, while tokens are computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, paged_gates
from vllm_kvpolicy.policies.admissions.wgkv.files import load
from vllm_kvpolicy.policies.admissions.wgkv.gates import Gates
from vllm_kvpolicy.policies.admitted import BaseAdmission
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.ranks import HeadShard


def from_options(
    wgkv_gates: str, wgkv_threshold: float | None, exact: bool
) -> "WriteGates":
    """Build the admission from its file of gates.

    Raises:
        ValueError: the file is missing, broken, or holds something else.
    """
    return WriteGates(load(wgkv_gates), wgkv_threshold, exact)


class WriteGates(BaseAdmission):
    """Admits the tokens whose trained gate is above a threshold.

    Args:
        gates: as read from a file.
        threshold: the paper's tau; None for the file's.
        exact: tokens decide while they are computed; this is a `Decider` then.
    """

    shift = 0

    def __init__(self, gates: Gates, threshold: float | None, exact: bool) -> None:
        turns = Needs(rope=True, halves=True, alike=True)
        self.needs = turns | Needs(keys=not exact, until=exact, exact=exact)
        self.file = gates
        self.window = gates.window
        self.threshold = gates.threshold if threshold is None else threshold
        self.weights = GateWeights(**gates.stacked())

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check that the gates fit the model; see `Gates.check_shape`."""
        self.file.check_shape(num_layers, num_kv_heads, head_dim)

    def take_heads(self, shard: HeadShard) -> None:
        """Take the gates of the rank's KV heads; see `BaseAdmission`."""
        self.weights = self.weights.of_heads(shard.kv_heads)

    @property
    def nbytes(self) -> int:
        """Bytes of the gates."""
        return sum(tensor.nbytes for tensor in self.weights.tensors().values())

    def attach(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        vllm_config: Any,
        rope: Rope | None,
    ) -> None:
        """Move the gates to the model's device and dtype; see `Decider`."""
        self._rope = rope
        first = next(model.parameters())
        self.weights = self.weights.to(first.device, vllm_config.model_config.dtype)
        self._of_layer = [
            GateWeights(**{k: t[i : i + 1] for k, t in self.weights.tensors().items()})
            for i in range(len(layers))
        ]

    def decisions(
        self, layer: int, key: torch.Tensor, positions: torch.Tensor
    ) -> Decisions:
        """Return [T, H] decisions of the tokens themselves; see `Decider`."""
        assert self._rope is not None  # `needs` says so
        # One event of one layer, [1, 1, H, T, D].
        keys = PagedTokens.from_dense(key.transpose(0, 1)[None, None])
        shape = keys.shape[:-1]
        token = torch.arange(len(positions), device=positions.device).expand(shape)
        weights = self._of_layer[layer]
        rows = keys, token, positions.expand(shape)
        gates = paged_gates(*rows, self._rope, weights)[0, 0]
        return Decisions((gates > self.threshold).T)

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Evaluate [E, L, H, F] gates of held tokens; see `BaseAdmission`."""
        keys = inputs.paged("keys")
        # Weights move to the device, and to the dtype of the model, once.
        self.weights = self.weights.to(keys.device, keys.pools[0].dtype)
        # Nothing has been dropped since the last event: positions count to the end.
        offset = token - inputs.lengths[..., None]
        positions = inputs.end[:, None, None, None] + offset
        rope = inputs.given("rope")
        return paged_gates(keys, token, positions, rope, self.weights)
