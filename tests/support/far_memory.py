"""Tensors whose rows lie billions of numbers apart, of which few pages exist."""

import mmap

import torch

# Beyond what 32 bits count, with or without a sign, in numbers and in bytes.
DISTANCE = 2**32 + 64
MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it


def far_rows(
    rows: int, columns: int, dtype: torch.dtype, distance: int = DISTANCE
) -> torch.Tensor:
    """Return zeros.

    Args:
        rows: R.
        columns: T.
        dtype: of the numbers.
        distance: numbers between two rows.

    Returns:
        [R, T], strides (distance, 1).
    """
    count = (rows - 1) * distance + columns
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    numbers = torch.frombuffer(memory, dtype=dtype)
    return numbers.as_strided((rows, columns), (distance, 1))


def moved_far(near: torch.Tensor, distance: int = DISTANCE) -> torch.Tensor:
    """Return a copy [R, T] with rows far apart."""
    far = far_rows(*near.shape, near.dtype, distance)
    far.copy_(near)
    return far
