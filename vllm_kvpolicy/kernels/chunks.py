"""Bounds memory: a few (event, layer) pairs at a time, and few numbers of rows.

For every shape that it meets on a CPU, oneDNN compiles code, in a buffer of 256 KB, and
PyTorch keeps the code of the last 1,024 shapes. The tokens of an event or a step are
hardly ever as many as before. A GELU of them kept 30 KB per new number, around which
glibc's heap grew by 240 KB, as the rest of the buffer rarely fits what is asked for
next; matrix products in bfloat16 kept more. `few_sizes` bounds this.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 256 * 2**20  # bound on the intermediate results of one chunk
# On a CPU, so that they stay in a second-level cache of usual size.
CPU_CHUNK_BYTES = 2 * 2**20
TILE = 64  # tokens; a power of two


def map_pairs(
    function: Callable[..., Tensor], pair_bytes: int, *tensors: Tensor
) -> Tensor:
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
    function: Callable[..., tuple[Tensor, ...]], pair_bytes: int, *tensors: Tensor
) -> tuple[Tensor, ...]:
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


def few_sizes(rows: Tensor) -> Tensor:
    """Append rows of zeros, so that there are one of a few numbers of rows.

    Args:
        rows: [..., T, d] floating point.

    Returns:
        [..., T', d]; T' is a power of two up to TILE, and at most an eighth more than
        T above. On other devices and in a graph that is compiled, `rows` themselves: a
        server without `--enforce-eager` has the networks of KVzap and DMS in such a
        graph, where oneDNN compiles their products for each T, as vLLM's own.
    """
    if rows.device.type != "cpu" or torch.compiler.is_compiling():
        return rows
    missing = next_size(rows.shape[-2]) - rows.shape[-2]
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def next_size(count: int) -> int:
    """Return the least of the few numbers that is not below `count`.

    They are 0, the powers of two up to TILE, and from there eight in each octave at
    equal distances: 80 numbers up to 32,768.
    """
    step = _distance(count)
    return -(-count // step) * step


def last_size(count: int) -> int:
    """Return the greatest of the few numbers that is not above `count`."""
    if count < TILE:
        return count and 1 << (count.bit_length() - 1)
    return count - count % _distance(count)


def _distance(count: int) -> int:
    """Return a number of which `next_size` is the least multiple from `count` on."""
    if count < TILE:
        return 1 << max(0, count - 1).bit_length()
    return 1 << (count.bit_length() - 4)  # an eighth of the power of two below
