"""Runs a function over (event, layer) pairs, a few at a time, to bound its memory.

Called by scorers whose intermediate results are much larger than keys.
Process: worker
"""

from collections.abc import Callable

import torch

CHUNK_BYTES = 256 * 2**20  # bound on the intermediate results of one chunk


def map_pairs(
    function: Callable[..., torch.Tensor], pair_bytes: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """Apply `function` to chunks of tensors [E, L, ...] that arrive as [n, ...].

    Args:
        function: takes one [n, ...] tensor for each of `tensors`, returns [n, ...].
        pair_bytes: what `function` allocates for one pair.
        tensors: [E, L, ...] each.

    Returns:
        [E, L, ...], the results put together.
    """
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    step = max(1, CHUNK_BYTES // pair_bytes)
    chunks = (
        function(*(tensor[start : start + step] for tensor in flat))
        for start in range(0, len(flat[0]), step)
    )
    return torch.cat(list(chunks)).unflatten(0, tensors[0].shape[:2])
