"""Fills the page tables and lengths of a step where all KV heads share them.

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

    Example: 70 tokens in superblocks of 16, frontier 3, survivors in superblocks 4 and
    6. The row reads 4, 6 and its local superblocks 7, 9; it holds 70 - 48 + 32 tokens.

    >>> tables = torch.zeros(1, 4, dtype=torch.int32)
    >>> lengths = torch.zeros(1, dtype=torch.int32)
    >>> page_tables_ref(
    ...     tables,
    ...     lengths,
    ...     rows=torch.tensor([0]),
    ...     block_table=torch.tensor([[0, 0, 0, 7, 9]], dtype=torch.int32),
    ...     seq_lens=torch.tensor([70], dtype=torch.int32),
    ...     global_blocks=torch.tensor([[4, 6]], dtype=torch.int32),
    ...     num_global=torch.tensor([2], dtype=torch.int32),
    ...     frontier_blocks=torch.tensor([3], dtype=torch.int32),
    ...     block_size=16,
    ... )
    >>> tables, lengths
    (tensor([[4, 6, 7, 9]], dtype=torch.int32), tensor([54], dtype=torch.int32))

    Args:
        tables: [R, C] int32, mutated; entries after a row's length are unspecified.
        lengths: [R] int32, mutated, tokens held.
        rows: [R] int64, each row's row of the request table, which has S rows.
        block_table: [R, P] int32, vLLM's rows, indexed by logical position // N.
        seq_lens: [R] int32, tokens computed after the step.
        global_blocks: [S, A] int32, superblocks of survivors.
        num_global: [S] int32, how many of them are in use.
        frontier_blocks: [S] int32, frontier in superblocks.
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


def enter_requests_ref(
    index: torch.Tensor,
    dest: torch.Tensor,
    frontier: torch.Tensor,
    global_blocks: torch.Tensor,
    num_global: torch.Tensor,
    frontier_blocks: torch.Tensor,
) -> None:
    """Enter where the survivors of some requests are now.

    Args:
        index: [E] int64, rows of the request table, none twice.
        dest: [E, D] int64, superblocks of their survivors.
        frontier: [E] int64, superblocks.
        global_blocks: [S, A] int32, rows `index` mutated, like those that follow.
        num_global: [S] int32.
        frontier_blocks: [S] int32.
    """
    width = dest.shape[1]
    global_blocks[index, :width] = dest.int()
    num_global.index_fill_(0, index, width)
    frontier_blocks[index] = frontier.int()


page_tables = Operation(page_tables_ref)
enter_requests = Operation(enter_requests_ref)
