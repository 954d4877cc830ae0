"""The write gate of WG-KV: predicts how useful a token will be after the window.

Source: WG-KV (arXiv 2512.17452) section 3.2 and
https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src/modeling_layers.py.
Deviations: the key before its rotation is recovered from the cached one, not stored;
the sigmoid is taken in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES, few_sizes, last_size
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope

EPSILON = 1e-6  # added to mean squares


@dataclass(frozen=True)
class GateWeights:
    """Gates of some KV heads, or with a leading L of those of L layers.

    All tensors have one dtype, in which gates are evaluated.

    Args:
        pre_norm: [D], weight of the norm of keys before their rotation.
        post_norm: [D], weight of the norm of keys as cached.
        first: [H, M, 2D], weights of the M hidden units.
        first_bias: [H, M].
        second: [H, M], weights of the output.
        second_bias: [H].
    """

    pre_norm: Tensor
    post_norm: Tensor
    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def to(self, device: torch.device, dtype: torch.dtype) -> "GateWeights":
        """Return the weights on a device and in a dtype; themselves if they are."""
        if self.first.device == device and self.first.dtype == dtype:
            return self
        moved = {name: t.to(device, dtype) for name, t in self.tensors().items()}
        return GateWeights(**moved)

    def of_heads(self, take: Callable[[Tensor, int], Tensor]) -> "GateWeights":
        """Return the gates of some heads.

        Args:
            take: returns them from a tensor and the axis of its heads.
        """
        per_head = ("first", "first_bias", "second", "second_bias")
        axis = self.second_bias.dim() - 1
        taken = {name: take(getattr(self, name), axis) for name in per_head}
        return replace(self, **taken)

    def layer(self, index: int) -> "GateWeights":
        """Return views of one layer's gates."""
        return GateWeights(**{name: t[index] for name, t in self.tensors().items()})


def gate(before: Tensor, after: Tensor, weights: GateWeights) -> Tensor:
    """Evaluate gates on keys before and after their rotation.

    Args:
        before: [..., H, T, D] floating point; with the key norm, where the model has
            one.
        after: like `before`, as cached.
        weights: of these heads; with a leading L, the keys are [..., L, H, T, D].

    Returns:
        [..., H, T] float32 between 0 and 1, of no use to of full use.
    """
    parts = (
        _normalised(before, weights.pre_norm),
        _normalised(after, weights.post_norm),
    )
    units = torch.cat(parts, -1) @ weights.first.transpose(-1, -2)
    units = F.gelu(units + weights.first_bias[..., None, :])
    logits = (units @ weights.second[..., None])[..., 0]
    return (logits + weights.second_bias[..., None]).float().sigmoid()


def _normalised(keys: Tensor, weight: Tensor) -> Tensor:
    """Scale keys to unit mean square in float32, then by `weight` in its dtype."""
    keys = keys.float()
    scale = torch.rsqrt(keys.square().mean(-1, keepdim=True) + EPSILON)
    return (keys * scale).to(weight.dtype) * weight[..., None, None, :]


def gate_cached(
    keys: Tensor,
    positions: Tensor,
    rope: Rope,
    weights: GateWeights,
) -> Tensor:
    """Evaluate gates on cached keys alone, some tokens at a time.

    Args:
        keys: [L, H, T, D] or [H, T, D] floating point, as cached; the tokens may come
            from several requests.
        positions: integers, broadcastable to the keys without D.
        rope: how the model rotates.
        weights: of these layers and heads, see `GateWeights`.

    Returns:
        [L, H, T] or [H, T] float32, see `gate`.
    """
    heads = keys[..., 0, 0].numel()
    channels, units = keys.shape[-1], weights.first.shape[-2]
    # At most: float32 keys in four stages, features, and units before and after GELU.
    token_bytes = 4 * heads * (10 * channels + 3 * units)
    step = last_size(max(1, CHUNK_BYTES // token_bytes))  # full chunks get no padding
    positions = positions.expand(keys.shape[:-1])
    values = []
    for start in range(0, keys.shape[-2], step):
        after = keys[..., start : start + step, :]
        before = rope.unrotate(after, positions[..., start : start + step])
        count = after.shape[-2]
        values.append(gate(few_sizes(before), few_sizes(after), weights)[..., :count])
    return torch.cat(values, -1)


def paged_gates_ref(
    keys: PagedTokens,
    token: Tensor,
    positions: Tensor,
    rope: Rope,
    weights: GateWeights,
) -> Tensor:
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
    token: Tensor,
    positions: Tensor,
    rope: Rope,
    weights: GateWeights,
) -> Tensor:
    """Do as `paged_gates_ref` for as many tokens as may be copied at a time."""
    # [L, H, E * F], tokens of all requests in one row.
    rows, places = (
        part.permute(1, 2, 0, *range(3, part.ndim)).flatten(2, 3)
        for part in (keys.at(token), positions)
    )
    gates = gate_cached(rows, places, rope, weights)
    return gates.unflatten(2, (len(token), -1)).permute(2, 0, 1, 3)


def check_shapes(
    keys: PagedTokens, token: Tensor, positions: Tensor, weights: GateWeights
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
