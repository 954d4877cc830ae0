"""Twins in CUDA C++, of csrc/: they take and return what their references do.

`kernels.preferences` or KVPOLICY_KERNELS chooses them. Exact: moves are bitwise. All
tensors are on one GPU, rows of tables side by side. An ImportError says that the
kernels were not built, a RuntimeError that a tensor has another dtype, size or device.
Source: this project. Deviations: none.
"""

from torch import Tensor

from vllm_kvpolicy.kernels.compact_pages import column_slices
from vllm_kvpolicy.kernels.libraries import CUDA


def compact_pages(
    pages: Tensor,
    source_slots: Tensor,
    dest_slots: Tensor,
    first: Tensor,
    in_place: Tensor | None = None,
) -> None:
    """A thread block per head and slice of columns that `column_slices` cuts."""
    move = CUDA.load().compact_pages
    moves = source_slots, dest_slots, first, in_place
    with_scratch = in_place is not None
    for slots, scratch in column_slices(pages, len(source_slots), with_scratch):
        move(slots, *moves, scratch)


def page_tables(
    tables: Tensor,
    lengths: Tensor,
    rows: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    global_blocks: Tensor,
    num_global: Tensor,
    skip: Tensor,
    pinned: Tensor,
    block_size: int,
) -> None:
    """Launches one thread per entry of a table."""
    batch = tables, lengths, rows, block_table, seq_lens
    survivors = global_blocks, num_global, skip, pinned
    CUDA.load().page_tables(*batch, *survivors, block_size)
