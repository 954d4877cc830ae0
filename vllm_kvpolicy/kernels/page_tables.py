"""Fills the page tables of a step: one list for all KV heads, or a list for each.

Pinned superblocks come first, as they are, then survivors, then local superblocks.

Example of the second: a request whose local superblocks are 7 and 9, at entries 3 and
4 of its row; none is pinned. Head 0 has the global pages 4 and 5, head 1 has page 8.
Its survivors have superblocks 2 and 0. Superblock b holds page 2b of head 0 and 2b + 1
of head 1, so local pages are 14, 18 and 15, 19. vLLM counts five superblocks; the heads
hold 4 and 3 pages, so the offsets are -1 and -2.

>>> tables = torch.zeros(1, 1, 2, 4, dtype=torch.int32)
>>> offsets = torch.zeros(1, 1, 2, dtype=torch.int32)
>>> head_page_tables_ref(
...     tables,
...     offsets,
...     which=torch.tensor([0]),
...     slots=torch.tensor([0]),
...     blocks=torch.tensor([[0, 0, 0, 7, 9]], dtype=torch.int32),
...     skip=torch.tensor([3], dtype=torch.int32),
...     pinned=torch.tensor([0], dtype=torch.int32),
...     global_blocks=torch.tensor([[2, 0]], dtype=torch.int32),
...     pages=torch.tensor([[8, 0], [0, 0], [4, 5]], dtype=torch.int32),
...     first=torch.tensor([[0, 2, 3]], dtype=torch.int32),
...     own_page=torch.tensor([0, 1]),
...     stride=2,
... )
>>> tables, offsets
(tensor([[[[ 4,  5, 14, 18],
           [ 8, 15, 19, 19]]]], dtype=torch.int32),
 tensor([[[-1, -2]]], dtype=torch.int32))

Source: this project. Deviations: none.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation


def page_tables_ref(
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
    """Put each row's global superblocks between its pinned and its local ones.

    Example: 70 tokens in superblocks of 16. Superblock 5 is pinned, the frontier is at
    entry 3, and what lay between has its survivors in superblock 6. The row reads 5, 6
    and its local superblocks 7, 9; it holds 70 - (2 - 1) * 16 tokens.

    >>> tables = torch.zeros(1, 4, dtype=torch.int32)
    >>> lengths = torch.zeros(1, dtype=torch.int32)
    >>> page_tables_ref(
    ...     tables,
    ...     lengths,
    ...     rows=torch.tensor([0]),
    ...     block_table=torch.tensor([[5, 0, 0, 7, 9]], dtype=torch.int32),
    ...     seq_lens=torch.tensor([70], dtype=torch.int32),
    ...     global_blocks=torch.tensor([[6]], dtype=torch.int32),
    ...     num_global=torch.tensor([1], dtype=torch.int32),
    ...     skip=torch.tensor([2], dtype=torch.int32),
    ...     pinned=torch.tensor([1], dtype=torch.int32),
    ...     block_size=16,
    ... )
    >>> tables, lengths
    (tensor([[5, 6, 7, 9]], dtype=torch.int32), tensor([54], dtype=torch.int32))

    Args:
        tables: [R, C] int32, mutated; entries after a row's length are unspecified.
        lengths: [R] int32, mutated, tokens held.
        rows: [R] int64, each row's row of the request table, which has S rows.
        block_table: [R, P] int32, vLLM's rows, indexed by logical position // N.
        seq_lens: [R] int32, tokens computed after the step.
        global_blocks: [S, A] int32, superblocks of survivors.
        num_global: [S] int32, how many of them are in use.
        skip: [S] int32, entries between the pinned ones and the frontier.
        pinned: [S] int32, leading entries that stay as they are.
        block_size: N, tokens per superblock.
    """
    held, skipped, first = num_global[rows], skip[rows], pinned[rows, None]
    torch.sub(seq_lens, (skipped - held) * block_size, out=lengths)
    column = torch.arange(tables.shape[1], dtype=torch.int32, device=rows.device)
    place = column - first  # among survivors
    local = column + (skipped - held)[:, None]
    own = torch.where(place < 0, column, local).clamp_(0, block_table.shape[1] - 1)
    torch.gather(block_table, 1, own.long(), out=tables)
    is_global = (place >= 0) & (place < held[:, None])
    survivor = place.clamp(0, global_blocks.shape[1] - 1).long()
    survivors = global_blocks[rows[:, None], survivor]
    tables.copy_(torch.where(is_global, survivors, tables))


def enter_requests_ref(
    index: Tensor,
    dest: Tensor,
    frontier: Tensor,
    pins: Tensor,
    global_blocks: Tensor,
    num_global: Tensor,
    skip: Tensor,
    pinned: Tensor,
) -> None:
    """Enter where the survivors of some requests are now.

    Args:
        index: [E] int64, rows of the request table, none twice.
        dest: [E, D] int64, superblocks of their survivors.
        frontier, pins: [E] int64, superblocks.
        global_blocks: [S, A] int32, rows `index` mutated, like those that follow.
        num_global, skip, pinned: [S] int32.
    """
    width = dest.shape[1]
    global_blocks[index, :width] = dest.int()
    num_global.index_fill_(0, index, width)
    skip[index] = (frontier - pins).int()
    pinned[index] = pins.int()


page_tables = Operation(page_tables_ref)
enter_requests = Operation(enter_requests_ref)


def head_page_tables_ref(
    tables: Tensor,
    offsets: Tensor,
    which: Tensor,
    slots: Tensor,
    blocks: Tensor,
    skip: Tensor,
    pinned: Tensor,
    global_blocks: Tensor,
    pages: Tensor,
    first: Tensor,
    own_page: Tensor,
    stride: int,
) -> None:
    """Put each head's global pages between its own of pinned and local superblocks.

    Args:
        tables: [L, B, H, C] int32 or int64, rows `which` mutated: page ids; any valid
            id after the last page. Rows of C are contiguous.
        offsets: [L, B, H], dtype of `tables`, rows `which` mutated: pages of a head
            less superblocks of its request, vLLM's count.
        which: [R] int64, rows to fill, of `tables`, `offsets` and `blocks`.
        slots: [R] int64, each one's row of the request table, which has S rows.
        blocks: [B, P] int32 or int64 superblock ids, indexed by logical position // N.
        skip: [S] int32, entries of a request's `blocks` that are neither pinned nor
            local.
        pinned: [S] int32, leading entries that stay as they are.
        global_blocks: [S, A] int32, superblocks of survivors.
        pages: [B, L * H] int32, the lists by superblock; see `enter_page_lists`.
        first: [S, L * H + 1] int32, where each head's start and end.
        own_page: [L * H] int64, id of each head's page of superblock 0.
        stride: distance in ids between a head's pages of neighbouring superblocks.
    """
    num_layers, _, num_heads, width = tables.shape
    shape = (len(which), num_layers, num_heads)
    bounds, skipped = first[slots], skip[slots, None]
    count = bounds.diff(dim=-1)
    more = (count - skipped).to(offsets.dtype)
    offsets[:, which] = more.view(shape).transpose(0, 1)
    column = torch.arange(width, dtype=torch.int32, device=tables.device)
    place = column - pinned[slots, None, None]  # among global pages
    entry = (bounds[:, :-1, None] + place).clamp_(min=0)
    in_row = (entry // len(own_page)).clamp_(max=global_blocks.shape[1] - 1)
    owner = global_blocks[slots].gather(1, in_row.flatten(1).long()).view_as(entry)
    cell = owner.long() * len(own_page) + entry % len(own_page)
    listed = pages.view(-1).index_select(0, cell.flatten()).view_as(entry)
    local = torch.where(place < 0, column, column - more.int()[..., None])
    local = local.clamp(0, blocks.shape[-1] - 1).flatten(1).long()
    own = blocks[which].gather(1, local).view_as(entry) * stride + own_page[:, None]
    is_global = (place >= 0) & (place < count[..., None])
    found = torch.where(is_global, listed, own).to(tables.dtype)
    tables[:, which] = found.view(*shape, width).transpose(0, 1)


def enter_page_lists_ref(
    table_pages: Tensor,
    table_first: Tensor,
    index: Tensor,
    dest: Tensor,
    first: Tensor,
    pages: Tensor,
) -> Tensor:
    """Replace the page lists of some requests, and count their pages.

    A request's lists lie end to end, the first n entries at its first superblock, and
    so on: they take as much room as its superblocks have pages.

    Args:
        table_pages: [B, n] int32, rows `dest` mutated.
        table_first: [S, n + 1] int32, rows `index` mutated.
        index: [E] int64, no row twice.
        dest: [E, D] int64, superblocks of survivors, none twice.
        first: [E, n + 1] int64, where each head's list starts and the last one ends.
        pages: [E, n * D] int64 page ids.

    Returns:
        [2, E] int64, pages of each request's longest list, and of all its lists.
    """
    table_first[index] = first.int()
    table_pages[dest] = pages.int().unflatten(1, (-1, table_pages.shape[1]))
    return torch.stack([first.diff(dim=-1).amax(-1), first[:, -1]])


head_page_tables = Operation(head_page_tables_ref)
enter_page_lists = Operation(enter_page_lists_ref)
