"""One total order over tokens, and the few selections that every policy is made of.

The order: higher score first; NaN counts as minus infinity; ties go to the later
position. All functions work on rows [R, T], never wait for the device, and their
result for a row does not depend on other rows or on padding.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation


def ranked_positions(score: Tensor) -> Tensor:
    """List each row's positions from best to worst.

    Args:
        score: [R, T] floating point; NaN allowed.

    Returns:
        [R, T] int64, a permutation of 0..T-1 per row.
    """
    # Adding zero turns -0.0 into 0.0, which a radix sort would rank apart.
    clean = torch.where(torch.isnan(score), -torch.inf, score) + 0.0
    order = clean.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return score.shape[-1] - 1 - order


def ranks_within(score: Tensor, group: Tensor) -> Tensor:
    """Rank each token among the tokens of its own group.

    Args:
        score: [R, T] floating point; NaN allowed.
        group: [R, T] int64, any values; equal values form a group within a row.

    Returns:
        [R, T] int64, 0 for the best token of a group.
    """
    order, grouped = _order_by(group, score)
    slot = torch.arange(score.shape[-1], device=score.device).expand_as(order)
    is_first = grouped != grouped.roll(1, -1)
    is_first[..., :1] = True
    first_slot = (slot * is_first).cummax(-1).values
    return torch.empty_like(order).scatter_(-1, order, slot - first_slot)


def rank_by(first: Tensor, score: Tensor) -> Tensor:
    """Rank tokens by `first`, and by score where that is equal.

    Args:
        first: [..., T] int64, higher is better.
        score: [..., T] floating point; NaN allowed.

    Returns:
        [..., T] int64, 0 for the best token of a row.
    """
    return ranks_of(_order_by(first, score)[0])


def _order_by(first: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions by falling `first`, then from best to worst; and its values."""
    order = ranked_positions(score)
    by_first = first.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return order.gather(-1, by_first.indices), by_first.values


def ranks_of(order: Tensor) -> Tensor:
    """Invert permutations [..., T] int64: where each position is in the order."""
    rank = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, rank)


def leading_run(must_keep: Tensor) -> Tensor:
    """Mark the sinks, or more of a prompt: the True entries before any False one.

    Args:
        must_keep: [..., T] bool.

    Returns:
        [..., T] bool.
    """
    return must_keep.long().cumprod(-1).bool()


def limit_must_keep_ref(must_keep: Tensor, budget: int) -> Tensor:
    """Shrink a must-keep set that exceeds the budget: recent tokens go before sinks.

    Args:
        must_keep: [..., T] bool; the leading run of True is taken for the sinks.
        budget: tokens per row.

    Returns:
        [..., T] bool, at most `budget` True per row: sinks (oldest first), then the
        newest of the rest. Equals `must_keep` where that already fits.
    """
    sinks = leading_run(must_keep)
    sinks = sinks & (sinks.long().cumsum(-1) <= budget)
    others = (must_keep & ~sinks).long()
    newer_or_same = others.flip(-1).cumsum(-1).flip(-1)
    room = budget - sinks.sum(-1, keepdim=True)
    return sinks | (others.bool() & (newer_or_same <= room))


def must_keep_tokens_ref(
    num_pages: Tensor,
    num_local: Tensor,
    sinks: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Mark the tokens that an event keeps in any case: sinks and local ones.

    Args:
        num_pages: [E, n] int64, full pages of each head below the frontier.
        num_local: [E] int64, tokens at and above it.
        sinks: [E] int64, first tokens that are always kept.
        block_size: N, tokens per page.
        num_tokens: T, no head holds more.

    Returns:
        Tokens held, [E, n] int64, and which of them stay, [E, n, T] bool.
    """
    token = torch.arange(num_tokens, device=num_pages.device)
    num_global = num_pages * block_size
    lengths = num_global + num_local[:, None]
    is_local = (token >= num_global[..., None]) & (token < lengths[..., None])
    return lengths, (token < sinks[:, None, None]) | is_local


def fill_next_best_ref(
    keep: Tensor, score: Tensor, valid: Tensor, target: Tensor | int
) -> Tensor:
    """Add the best tokens that are not kept yet until a row keeps `target`.

    Args:
        keep: [R, T] bool, kept already; stays kept.
        score: [R, T] floating point; NaN allowed.
        valid: [R, T] bool, False on padding and on anything not to be chosen.
        target: tokens per row, an int or [R] int64.

    Returns:
        [R, T] bool with `target` True per row: fewer where the row has fewer valid
        tokens, more where `keep` holds more already.
    """
    return fill_in_order(keep, ranked_positions(score), valid, target)


def fill_in_order(
    keep: Tensor, order: Tensor, valid: Tensor, target: Tensor | int
) -> Tensor:
    """Do as `fill_next_best_ref`; `order` [R, T] int64 is from best to worst."""
    if isinstance(target, Tensor):
        target = target.unsqueeze(-1)
    is_candidate = (valid & ~keep).gather(-1, order)
    missing = target - keep.sum(-1, keepdim=True)
    is_added = is_candidate & (is_candidate.cumsum(-1) <= missing)
    return keep | torch.zeros_like(keep).scatter_(-1, order, is_added)


def top_k_mask_ref(
    score: Tensor, must_keep: Tensor, valid: Tensor, budget: Tensor | int
) -> Tensor:
    """Keep the must-keep tokens and the best of the others, `budget` in all.

    Args:
        score, valid: as for `fill_next_best_ref`.
        must_keep: [R, T] bool, at most `budget` True per row (see `limit_must_keep`).
        budget: tokens per row, an int or [R] int64, at most the row's valid tokens.

    Returns:
        [R, T] bool, exactly `budget` True per row.
    """
    return fill_next_best_ref(must_keep & valid, score, valid, budget)


def resize_ref(
    keep: Tensor,
    score: Tensor,
    must_keep: Tensor,
    num_pages: Tensor,
    quota: Tensor,
    block_size: int,
) -> Tensor:
    """Fill up or trim a selection of a row's first pages to whole pages.

    Must-keep tokens come first, then kept ones, then others.

    Args:
        keep: [..., T] bool, the selection.
        score: [..., T] floating point, ranks tokens of the same class; NaN allowed.
        must_keep: [..., T] bool.
        num_pages: [...] int64, pages to choose from; what lies behind is left out.
        quota: [...] int64, pages to fill.
        block_size: N, tokens per page.

    Returns:
        [..., T] bool with `quota` * N True per row, fewer where fewer are held.
    """
    token = torch.arange(keep.shape[-1], device=keep.device)
    valid = token < (num_pages * block_size)[..., None]
    grade = torch.where(must_keep, 2, keep.long())
    rank = rank_by(torch.where(valid, grade, -1), score)
    return valid & (rank < (quota * block_size)[..., None])


def ascending_indices(mask: Tensor, count: int) -> Tensor:
    """List the positions of a mask's True entries, oldest first.

    Args:
        mask: [R, T] bool.
        count: entries to list per row; surplus True entries are left out.

    Returns:
        [R, count] int64, ascending; -1 on the right of rows with fewer True entries.
    """
    slot = mask.long().cumsum(-1) - 1
    # Everything that is not listed lands in one extra column, cut off below.
    slot = torch.where(mask & (slot < count), slot, count)
    position = torch.arange(mask.shape[-1], device=mask.device).expand_as(slot)
    listed = position.new_full((*mask.shape[:-1], count + 1), -1)
    return listed.scatter_(-1, slot, position)[..., :count]


limit_must_keep = Operation(limit_must_keep_ref)
must_keep_tokens = Operation(must_keep_tokens_ref)
fill_next_best = Operation(fill_next_best_ref)
top_k_mask = Operation(top_k_mask_ref)
resize = Operation(resize_ref)
