"""Page tables and lengths of a step, as attention kernels read them.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.dispatch import Operation


def page_tables_ref(
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

    Args:
        tables: [R, C] int32, mutated; what lies behind a row's length is unspecified.
        lengths: [R] int32, mutated, tokens held.
        rows: [R] int64, slot of each row.
        block_table: [R, P] int32, vLLM's rows, indexed by logical position // N.
        seq_lens: [R] int32, tokens computed after the step.
        global_blocks: [slots, A] int32, superblocks of survivors.
        num_global: [slots] int32, how many of them count.
        frontier_blocks: [slots] int32, frontier in superblocks.
        block_size: N, tokens per superblock.
    """
    held, frontier = num_global[rows], frontier_blocks[rows]
    torch.sub(seq_lens, (frontier - held) * block_size, out=lengths)
    column = torch.arange(tables.shape[1], dtype=torch.int32, device=rows.device)
    local = (column - held[:, None] + frontier[:, None]).clamp_(
        0, block_table.shape[1] - 1
    )
    torch.gather(block_table, 1, local.long(), out=tables)
    width = min(tables.shape[1], global_blocks.shape[1])
    is_global = column[:width] < held[:, None]
    head = tables[:, :width]
    head.copy_(torch.where(is_global, global_blocks[rows, :width], head))


page_tables = Operation(page_tables_ref)
