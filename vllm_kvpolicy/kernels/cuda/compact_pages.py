"""Moves kept tokens to their places, a thread block per head and slice of columns.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.compact_pages import column_slices
from vllm_kvpolicy.kernels.cuda.library import load


def compact_pages(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; see `kernels.compact_pages`.

    Args:
        pages: [P, N, D] on a GPU, mutated; see `column_slices` for its strides.
        source_slots: [M] int64.
        dest_slots: [M] int64.
        first: [rows + 1] int64.
        in_place: [M] bool; None where it holds for all.

    Raises:
        ImportError: the kernels were not built.
        ValueError: `pages` has other strides.
        RuntimeError: another tensor has another dtype, size or device.

    Exact: moves are bitwise.
    """
    load()
    moves = source_slots, dest_slots, first, in_place
    with_scratch = in_place is not None
    for slots, scratch in column_slices(pages, len(source_slots), with_scratch):
        torch.ops.vllm_kvpolicy.compact_pages(slots, *moves, scratch)
