"""Runs a function over (event, layer) pairs, a few at a time, to bound its memory."""

from collections.abc import Callable

import torch

CHUNK_BYTES = 256 * 2**20  # bound on the intermediate results of one chunk
# On a CPU, so that they stay in a second-level cache of usual size.
CPU_CHUNK_BYTES = 2 * 2**20


def map_pairs(
    function: Callable[..., torch.Tensor], pair_bytes: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """Apply `function` to chunks of tensors [E, L, ...] that arrive as [n, ...].

    Args:
        function: takes one [n, ...] tensor for each of `tensors`, returns [n, ...].
        pair_bytes: what `function` allocates for one pair.
        tensors: [E, L, ...] each.

    Returns:
        [E, L, ...], the results combined.
    """
    return map_pairs_to_many(lambda *part: (function(*part),), pair_bytes, *tensors)[0]


def map_pairs_to_many(
    function: Callable[..., tuple[torch.Tensor, ...]],
    pair_bytes: int,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Like `map_pairs` where `function` returns several [n, ...] tensors."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    most = CPU_CHUNK_BYTES if flat[0].device.type == "cpu" else CHUNK_BYTES
    step = max(1, most // pair_bytes)
    chunks = [
        function(*(tensor[start : start + step] for tensor in flat))
        for start in range(0, len(flat[0]), step)
    ]
    whole = chunks[0] if len(chunks) == 1 else map(torch.cat, zip(*chunks, strict=True))
    return tuple(part.unflatten(0, tensors[0].shape[:2]) for part in whole)
