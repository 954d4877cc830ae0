"""Reduces each token's key or value to one number: a norm, a projection, a square.

Source: this project. Deviations: none.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.paged import PagedTokens


def paged_norms_ref(tokens: PagedTokens, lengths: Tensor) -> Tensor:
    """Measure how long each key or value is.

    Args:
        tokens: [E, L, H, T, D] on pages, model dtype, right-padded; padding is ignored
            whatever it holds.
        lengths: [E, L, H] int64, tokens held, 1..T.

    Returns:
        [E, L, H, T] float32, zero on padding.
    """
    norms = torch.linalg.vector_norm(tokens.dense, dim=-1, dtype=torch.float32)
    return norms.masked_fill(~_is_held(tokens, lengths), 0.0)


def paged_cosines_ref(keys: PagedTokens, lengths: Tensor) -> Tensor:
    """Compare each key k_i with the mean direction of its row, sum_j k_j / |k_j|.

    Args:
        keys, lengths: as for `paged_norms_ref`.

    Returns:
        [E, L, H, T] float32 in [-1, 1], zero on padding. The sum over tokens is carried
        in float64. Lengths below 1e-12 count as 1e-12, that of the sum as well.
    """
    is_held = _is_held(keys, lengths)
    pair_bytes = 4 * keys.dense[0, 0].numel() * 4  # four float32 copies at a time
    cosines = map_pairs(_cosines, pair_bytes, keys.dense, is_held)
    return cosines.masked_fill(~is_held, 0.0)


def paged_projections_ref(
    keys: PagedTokens, lengths: Tensor, directions: Tensor
) -> Tensor:
    """Project the keys of each row on one direction.

    Args:
        keys, lengths: as for `paged_norms_ref`.
        directions: [E, L, H, D] float32.

    Returns:
        [E, L, H, T] float32, zero on padding.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_shape("directions", directions, (*keys.shape[:3], keys.shape[-1]))

    def project(keys: Tensor, directions: Tensor) -> Tensor:
        return (keys.float() @ directions[..., None]).squeeze(-1)

    pair_bytes = 4 * keys.dense[0, 0].numel()  # a float32 copy
    projections = map_pairs(project, pair_bytes, keys.dense, directions)
    return projections.masked_fill(~_is_held(keys, lengths), 0.0)


def paged_pair_projections_ref(
    keys: PagedTokens, lengths: Tensor, directions: Tensor, by_length: Tensor
) -> Tensor:
    """Project keys for each query head, and weigh the lengths of their channel pairs.

    Channels f and f + D/2 are a pair, as RoPE turns them. Query head h of Hq = H * G
    scores the keys of KV head h // G: directions . k + sum_f by_length_f |pair f of k|.

    Args:
        keys, lengths: as for `paged_norms_ref`; D is even.
        directions: [E, L, Hq, D] float32.
        by_length: [E, L, Hq, D/2] float32.

    Returns:
        [E, L, Hq, T] float32, zero on padding.

    Raises:
        ValueError: shapes that do not fit together.
    """
    group = check_pairs(keys, directions, by_length)
    pair_bytes = 2 * 4 * keys.dense[0, 0].numel()  # two float32 copies
    scores = map_pairs(_pair_projections, pair_bytes, keys.dense, directions, by_length)
    is_held = _is_held(keys, lengths).repeat_interleave(group, 2)
    return scores.masked_fill(~is_held, 0.0)


def paged_quadratics_ref(
    keys: PagedTokens, lengths: Tensor, directions: Tensor, matrices: Tensor
) -> Tensor:
    """Give each key k the value directions . k + k . matrices k of each query head.

    Query head h of Hq = H * G has values of the keys of KV head h // G.

    Args:
        keys, lengths: as for `paged_norms_ref`.
        directions: [E, L, Hq, D] float32.
        matrices: [E, L, Hq, D, D] float32, symmetric.

    Returns:
        [E, L, Hq, T] float32, zero on padding.

    Raises:
        ValueError: shapes that do not fit together.
    """
    group = check_squares(keys, directions, matrices)
    pair_bytes = (2 * group + 1) * 4 * keys.dense[0, 0].numel()  # float32 copies
    values = map_pairs(_quadratics, pair_bytes, keys.dense, directions, matrices)
    is_held = _is_held(keys, lengths).repeat_interleave(group, 2)
    return values.masked_fill(~is_held, 0.0)


paged_norms = Operation(paged_norms_ref)
paged_cosines = Operation(paged_cosines_ref)
paged_projections = Operation(paged_projections_ref)
paged_pair_projections = Operation(paged_pair_projections_ref)
paged_quadratics = Operation(paged_quadratics_ref)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor has another shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}")


def check_pairs(keys: PagedTokens, directions: Tensor, by_length: Tensor) -> int:
    """Return G of `paged_pair_projections`, or raise ValueError as it does."""
    size = keys.shape[-1]
    if size % 2:
        raise ValueError(f"keys: expected an even head size, got {size}")
    return _check_heads(keys, directions, "by_length", by_length, size // 2)


def check_squares(keys: PagedTokens, directions: Tensor, matrices: Tensor) -> int:
    """Return G of `paged_quadratics`, or raise ValueError as it does."""
    size = keys.shape[-1]
    return _check_heads(keys, directions, "matrices", matrices, size, size)


def _check_heads(
    keys: PagedTokens, directions: Tensor, name: str, others: Tensor, *sizes: int
) -> int:
    """Return G where `others` are [E, L, H * G, *sizes]."""
    num_events, num_layers, num_heads, _, size = keys.shape
    group = max(1, directions.shape[2] // num_heads)
    rows = num_events, num_layers, num_heads * group
    check_shape("directions", directions, (*rows, size))
    check_shape(name, others, (*rows, *sizes))
    return group


def _is_held(tokens: PagedTokens, lengths: Tensor) -> Tensor:
    """[E, L, H, T] bool, False on padding."""
    return torch.arange(tokens.num_tokens, device=tokens.device) < lengths[..., None]


def _cosines(keys: Tensor, is_held: Tensor) -> Tensor:
    """Return [n, H, T], the cosine of keys [n, H, T, D] with the sum of those held."""
    unit = F.normalize(keys.float(), dim=-1)
    held = torch.where(is_held[..., None], unit, 0.0)
    mean = F.normalize(held.sum(2, keepdim=True, dtype=torch.float64), dim=-1)
    return (unit * mean.float()).sum(-1)


def _pair_projections(keys: Tensor, directions: Tensor, by_length: Tensor) -> Tensor:
    """Return [n, Hq, T] float32 of keys [n, H, T, D]."""
    num_heads, keys = keys.shape[1], keys.float()
    length = torch.hypot(*keys.chunk(2, dim=-1))
    score = directions.unflatten(1, (num_heads, -1)) @ keys.transpose(-1, -2)
    score += by_length.unflatten(1, (num_heads, -1)) @ length.transpose(-1, -2)
    return score.flatten(1, 2)


def _quadratics(keys: Tensor, directions: Tensor, matrices: Tensor) -> Tensor:
    """Return [n, Hq, T] float32 of keys [n, H, T, D]."""
    num_heads, keys = keys.shape[1], keys.float()[:, :, None]
    per_head = directions.unflatten(1, (num_heads, -1))[..., None, :]
    turned = keys @ matrices.unflatten(1, (num_heads, -1))  # [n, H, G, T, D]
    return turned.add_(per_head).mul_(keys).sum(-1).flatten(1, 2)
