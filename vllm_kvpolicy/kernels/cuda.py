"""Twins in CUDA C++, of csrc/: they take and return what their references do.

`kernels.preferences` or KVPOLICY_KERNELS chooses them. Exact: moves are bitwise. All
tensors are on one GPU, rows of tables side by side. An ImportError says that the
kernels were not built, a RuntimeError that a tensor has another dtype, size or device.
Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.compact_pages import column_slices
from vllm_kvpolicy.kernels.libraries import CUDA


def compact_pages(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """A thread block per head and slice of columns that `column_slices` cuts."""
    move = CUDA.load().compact_pages
    moves = source_slots, dest_slots, first, in_place
    with_scratch = in_place is not None
    for slots, scratch in column_slices(pages, len(source_slots), with_scratch):
        move(slots, *moves, scratch)


def page_tables(
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    global_blocks: torch.Tensor,
    num_global: torch.Tensor,
    frontier_blocks: torch.Tensor,
    block_size: int,
) -> None:
    """Launches one thread per entry of a table."""
    batch = tables, lengths, rows, block_table, seq_lens
    survivors = global_blocks, num_global, frontier_blocks
    CUDA.load().page_tables(*batch, *survivors, block_size)
