"""Decides how many head pages each KV head gets after an event, and which.

*How many*: largest remainder, the total met exactly. The same number of tokens is added
to every head, or taken from every head, until the pages they fill add up to the total;
what a floor or a cap keeps a head from giving or taking falls to the others. Where the
counts fill the total up to rounding, that is the rule of largest remainders.

*Which*: a head keeps pages of its own first. Two heads of one layer hold pages 0, 2, 4
and 1, 3, 5, their stock pages of superblocks 0, 1 and 2. The request keeps superblocks
0 and 1. Head 0, which gets three pages, keeps 0 and 2 and takes 3 from head 1.

>>> made = assign_pages_ref(
...     held=torch.tensor([[[0, 2, 4], [1, 3, 5]]]),
...     num_held=torch.tensor([[3, 3]]),
...     dest=torch.tensor([[0, 1]]),
...     quota=torch.tensor([[3, 1]]),
...     num_blocks=3,
...     num_kv_heads=2,
... )
>>> made.first, made.pages
(tensor([[0, 3, 4]]), tensor([[0, 2, 3, 1]]))
>>> made.unmoved
tensor([[ True,  True, False,  True]])

Source: this project; remainders as in Hamilton's method of apportionment. Deviations:
a common shift in place of Hamilton's common factor, so that a larger total never takes
a page from any head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.ranking import ascending_indices

MOST_TOKENS = 2**35
BASE = 16  # shifts tried at once


def num_digits(most: int) -> int:
    """Return how many digits to the base of 16 a shift has where no head has more."""
    return -(-(2 * most).bit_length() // 4)


def count_in_pages_ref(mask: Tensor, num_pages: Tensor, block_size: int) -> Tensor:
    """Count the True entries in each row's first pages.

    Args:
        mask: [..., T] bool.
        num_pages: [...] int64.
        block_size: N, entries per page.

    Returns:
        [...] int64.
    """
    entry = torch.arange(mask.shape[-1], device=mask.device)
    return (mask & (entry < (num_pages * block_size)[..., None])).sum(-1)


def page_quota_ref(
    tokens: Tensor,
    floors: Tensor,
    caps: Tensor,
    total: Tensor,
    block_size: int,
    most: int = MOST_TOKENS,
    fills: bool = True,
) -> Tensor:
    """Share `total` pages among the n heads of each group.

    Example: heads ask for 100, 40 and 20 tokens, 6.25, 2.5 and 1.25 pages of 16. The
    whole pages make 9; the tenth goes to the largest remainder, that of the second.

    >>> tokens, floors = torch.tensor([[100, 40, 20]]), torch.tensor([[1, 1, 1]])
    >>> page_quota_ref(tokens, floors, 9 * floors, torch.tensor([10]), block_size=16)
    tensor([[6, 3, 1]])

    Args:
        tokens: [G, n] int64, tokens that each head asks for, at most `most`.
        floors: [G, n] int64 pages, at least 0.
        caps: [G, n] int64 pages, at least `floors`; in tokens at most `most`.
        total: [G] int64 pages.
        block_size: N, tokens per page.
        most: a bound on `tokens`; a lower one takes fewer passes.
        fills: share out all of `total`; otherwise no more than the pages that heads ask
            for, but one at least.

    Returns:
        [G, n] int64 pages between floors and caps. They add up to `total`, or to the
        nearest sum that floors and caps allow. Of equal claims to the last pages the
        lower index wins.
    """

    def pages(shift: Tensor) -> Tensor:
        return ((tokens[:, None] + shift[..., None]) // block_size).clamp(
            floors[:, None], caps[:, None]
        )

    if not fills:
        wanted = -(-tokens // block_size)
        total = torch.minimum(total, wanted.sum(-1).clamp(min=1))
    total = total[:, None]
    # The largest shift that the total covers, digit by digit from one that none fills.
    shift = -tokens.amax(-1, keepdim=True)
    digit = torch.arange(BASE, device=tokens.device)
    for place in reversed(range(num_digits(most))):
        higher = shift + digit * BASE**place  # [G, BASE], from the last on not covered
        covered = pages(higher).sum(-1) <= total
        fits = (covered.sum(-1, keepdim=True) - 1).clamp(min=0)
        shift = shift + fits * BASE**place
    quota, more = pages(shift + digit[:2]).unbind(1)
    claims = more - quota  # 0 or 1: the next page of the next token
    left = total - quota.sum(-1, keepdim=True)
    return quota + claims * (claims.cumsum(-1) <= left)


count_in_pages = Operation(count_in_pages_ref)
page_quota = Operation(page_quota_ref)


@dataclass(frozen=True)
class PageLists:
    """Page lists of all heads of a request, concatenated.

    Args:
        first: [E, n + 1] int64, where each head's list starts; the last entry is where
            the last one ends.
        pages: [E, C] int64 page ids; 0 after the last list.
        unmoved: [E, C] bool, the page had the same owner and place in its list before;
            None where that is so for all.
    """

    first: Tensor
    pages: Tensor
    unmoved: Tensor | None


def assign_pages_ref(
    held: Tensor,
    num_held: Tensor,
    dest: Tensor,
    quota: Tensor,
    num_blocks: int,
    num_kv_heads: int,
) -> PageLists:
    """Give each head its quota of the request's pages, its own pages first.

    The pages of the superblocks that a request owns after the event are its arena,
    superblock by superblock; a place in it is a cell. A head keeps the first of its
    pages that are in the arena, in their order. Pages that no head keeps fill the
    shortfalls, lowest cell to lowest head.

    Args:
        held: [E, n, P] int64 page ids of each head before the event, in list order;
            any valid id on padding.
        num_held: [E, n] int64, entries of `held` that count.
        dest: [E, D] int64, superblocks that the request owns afterwards.
        quota: [E, n] int64, pages of each head; in all at most those of the arena.
            Where it is less, only the lowest cells are used, whole superblocks.
        num_blocks: B, superblocks of the pool.
        num_kv_heads: H, of a layer.

    Returns:
        The new lists, C = n * D.
    """
    head = torch.arange(held.shape[1], device=dest.device)
    stock = head // num_kv_heads * (num_blocks * num_kv_heads) + head % num_kv_heads
    arena = (dest[..., None] * num_kv_heads + stock).flatten(1)
    cells = _cells(held, dest, num_blocks, num_kv_heads)
    return _assign(held, num_held, cells, arena, quota)


def _cells(held: Tensor, dest: Tensor, num_blocks: int, num_kv_heads: int) -> Tensor:
    """Return [E, n, P] places of pages in their event's arena, -1 outside."""
    num_events, num_dest = dest.shape
    where = torch.full((num_blocks,), -1, device=dest.device)
    order = torch.arange(dest.numel(), device=dest.device)
    found = where.scatter(0, dest.flatten(), order)[held // num_kv_heads % num_blocks]
    event = torch.arange(num_events, device=dest.device)[:, None, None]
    mine = (found >= 0) & (found // num_dest == event)
    # Which head's stock page it is.
    layer = held // (num_kv_heads * num_blocks)
    stock = layer * num_kv_heads + held % num_kv_heads
    return torch.where(mine, found % num_dest * held.shape[1] + stock, -1)


def _assign(
    held: Tensor, num_held: Tensor, cells: Tensor, arena: Tensor, quota: Tensor
) -> PageLists:
    """Assign the pages of arenas [E, C]; all others [E, n, P] or [E, n]."""
    num_events, num_heads, width = held.shape
    num_cells = arena.shape[-1]
    first = torch.nn.functional.pad(quota.cumsum(-1), (1, 0))
    total = first[:, -1:]
    used = -(-total // num_heads) * num_heads
    place = torch.arange(width, device=held.device)
    usable = (place < num_held[..., None]) & (cells >= 0) & (cells < used[..., None])
    rank = usable.long().cumsum(-1) - 1
    kept = usable & (rank < quota[..., None])
    num_kept = kept.sum(-1)

    spare = torch.full_like(arena[:, :1], num_cells)[..., None]
    taken = torch.zeros(num_events, num_cells + 1, dtype=torch.bool, device=held.device)
    taken = taken.scatter(1, torch.where(kept, cells, spare).flatten(1), True)
    free = ascending_indices(~taken[:, :num_cells], num_cells).clamp_min(0)
    target = torch.where(kept, first[:, :-1, None] + rank, spare).flatten(1)
    listed = arena.new_zeros(num_events, num_cells + 1)
    listed = listed.scatter(1, target, cells.clamp_min(0).flatten(1))[:, :num_cells]

    entry = torch.arange(num_cells, device=held.device).repeat(num_events, 1)
    owner = torch.searchsorted(first[:, 1:].contiguous(), entry, right=True)
    owner = owner.clamp_max(num_heads - 1)
    index = entry - first.gather(1, owner)
    stays = (index < num_kept.gather(1, owner)) & (entry < total)
    free_rank = ((~stays).long().cumsum(-1) - 1).clamp_min(0)
    cell = torch.where(stays, listed, free.gather(1, free_rank))
    pages = torch.where(entry < total, arena.gather(1, cell), 0)

    before = owner * width + index.clamp(0, width - 1)
    same = held.flatten(1).gather(1, before) == pages
    unmoved = stays & same & (index < width)
    return PageLists(first, pages, unmoved)


assign_pages = Operation(assign_pages_ref)
