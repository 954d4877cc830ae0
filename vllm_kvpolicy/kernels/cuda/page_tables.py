"""Fills page tables and lengths of a step, a thread per entry.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cuda.library import load


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
    """Put each row's global superblocks in front of its local ones.

    Args: as for `kernels.page_tables`, all on one GPU, rows of tables side by side.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size, order or device.
    """
    load()
    batch = tables, lengths, rows, block_table, seq_lens
    survivors = global_blocks, num_global, frontier_blocks
    torch.ops.vllm_kvpolicy.page_tables(*batch, *survivors, block_size)
