"""Moves kept tokens to their places, heads side by side.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load


def compact_pages(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; see `kernels.compact_pages`.

    Args:
        pages: [P, N, D] of 1, 2, 4 or 8 bytes, any strides, mutated.
        source_slots: [M] int64, contiguous, like those that follow.
        dest_slots: [M] int64.
        first: [rows + 1] int64.
        in_place: [M] bool; None where it holds for all.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.

    Exact: moves are bitwise.
    """
    load()
    moves = source_slots, dest_slots, first, in_place
    torch.ops.vllm_kvpolicy_cpu.compact_pages(pages, *moves)
