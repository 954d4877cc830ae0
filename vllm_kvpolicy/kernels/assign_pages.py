"""Decides which head page goes to which KV head after an event.

Example: two heads hold pages 0, 2, 4 and 1, 3, 5. The request keeps pages 0 to 3.
Head 0, which gets three of them, keeps 0 and 2 and takes 3 from head 1.

>>> made = assign_pages(
...     held=torch.tensor([[[0, 2, 4], [1, 3, 5]]]),
...     num_held=torch.tensor([[3, 3]]),
...     cells=torch.tensor([[[0, 2, -1], [1, 3, -1]]]),
...     arena=torch.tensor([[0, 1, 2, 3]]),
...     quota=torch.tensor([[3, 1]]),
... )
>>> made.first, made.pages
(tensor([[0, 3, 4]]), tensor([[0, 2, 3, 1]]))
>>> made.unmoved
tensor([[ True,  True, False,  True]])

Source: this project. Deviations: none.
"""

from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.ranking import ascending_indices


@dataclass(frozen=True)
class PageLists:
    """Page lists of all heads of a request, concatenated.

    Args:
        first: [G, n + 1] int64, where each head's list starts; the last entry is the
            number of pages in use.
        pages: [G, C] int64 page ids; 0 after the last list.
        unmoved: [G, C] bool, the page had the same owner and place in its list before;
            None where that is so for all.
    """

    first: torch.Tensor
    pages: torch.Tensor
    unmoved: torch.Tensor | None


def assign_pages(
    held: torch.Tensor,
    num_held: torch.Tensor,
    cells: torch.Tensor,
    arena: torch.Tensor,
    quota: torch.Tensor,
) -> PageLists:
    """Give each head its quota of the request's pages, its own pages first.

    The arena is the list of pages that a request owns after the event; a place in it is
    a cell. A head keeps the first of its pages that are in the arena, in their order.
    Pages that no head keeps fill the shortfalls, lowest cell to lowest head.

    Args:
        held: [G, n, P] int64 page ids of each head before the event, in list order.
        num_held: [G, n] int64, entries of `held` that count.
        cells: [G, n, P] int64, place of each held page in the arena, or -1.
        arena: [G, C] int64 page ids that the request owns afterwards.
        quota: [G, n] int64, pages of each head; at most C per group in all. Where it
            is less, only the lowest cells are used, whole rows of n cells.

    Returns:
        The new lists.
    """
    num_groups, num_heads, width = held.shape
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
    taken = torch.zeros(num_groups, num_cells + 1, dtype=torch.bool, device=held.device)
    taken = taken.scatter(1, torch.where(kept, cells, spare).flatten(1), True)
    free = ascending_indices(~taken[:, :num_cells], num_cells).clamp_min(0)
    target = torch.where(kept, first[:, :-1, None] + rank, spare).flatten(1)
    listed = arena.new_zeros(num_groups, num_cells + 1)
    listed = listed.scatter(1, target, cells.clamp_min(0).flatten(1))[:, :num_cells]

    entry = torch.arange(num_cells, device=held.device).repeat(num_groups, 1)
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
