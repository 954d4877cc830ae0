"""Evaluates the write gates of tokens whose keys are on pages.

Source: WG-KV (arXiv 2512.17452) section 3.2; see kernels.wgkv_gate. Deviations: there.
"""

import torch

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights, gate_cached


def paged_gates_ref(
    keys: PagedTokens,
    token: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    weights: GateWeights,
) -> torch.Tensor:
    """Evaluate the gates of some tokens of each row.

    Args:
        keys: [E, L, H, T, D] on pages, model dtype, D even.
        token: [E, L, H, F] int64, tokens held, by their places in the rows.
        positions: [E, L, H, F] int64, of these tokens in their requests.
        rope: how the model rotates, on the device.
        weights: of these layers and heads, in the dtype of the keys, on the device.

    Returns:
        [E, L, H, F] float32 between 0 and 1; see `wgkv_gate.gate`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_shapes(keys, token, positions, weights)
    num_rows, size = token[..., 0].numel(), keys.shape[-1]
    step = max(1, CHUNK_BYTES // (8 * num_rows * size))
    parts = [
        _some(keys, some, places, rope, weights)
        for some, places in zip(
            token.split(step, dim=-1), positions.split(step, dim=-1), strict=True
        )
    ]
    return torch.cat(parts, dim=-1)


def _some(
    keys: PagedTokens,
    token: torch.Tensor,
    positions: torch.Tensor,
    rope: Rope,
    weights: GateWeights,
) -> torch.Tensor:
    """Do as `paged_gates_ref` for as many tokens as may be copied at a time."""
    # [L, H, E * F], tokens of all requests in one row.
    rows, places = (
        part.permute(1, 2, 0, *range(3, part.ndim)).flatten(2, 3)
        for part in (keys.at(token), positions)
    )
    gates = gate_cached(rows, places, rope, weights)
    return gates.unflatten(2, (len(token), -1)).permute(2, 0, 1, 3)


def check_shapes(
    keys: PagedTokens,
    token: torch.Tensor,
    positions: torch.Tensor,
    weights: GateWeights,
) -> None:
    """Raise ValueError if shapes do not fit together; see `paged_gates_ref`."""
    num_layers, num_heads, size = keys.shape[1], keys.shape[2], keys.shape[4]
    if token.shape[:3] != keys.shape[:3] or positions.shape != token.shape:
        raise ValueError(
            f"token, positions: expected {list(keys.shape[:3])} rows of equal length, "
            f"got {list(token.shape)} and {list(positions.shape)}"
        )
    expected = num_layers, num_heads, 2 * size
    got = (*weights.first.shape[:2], weights.first.shape[-1])
    if weights.first.ndim != 4 or got != expected or size % 2:
        raise ValueError(
            f"weights: expected gates of {num_layers} layers of {num_heads} heads of "
            f"even size {size}, got first weights of {list(weights.first.shape)}"
        )


paged_gates = Operation(paged_gates_ref)
