"""Bounds the keys of each page and so a query's scores on it, and picks the best.

Source: Quest (arXiv 2406.10774) section 3. Deviations: none.
"""

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.ranking import ranks_of

LOWEST = torch.finfo(torch.float32).min
SORTED_BYTES = 33  # of what exists at a time for each page that is sorted


def page_bounds_ref(bounds: Tensor, keys: Tensor, pages: Tensor) -> None:
    """Find the smallest and largest number of each channel on some pages.

    Args:
        bounds: [2, P, D] model dtype, contiguous, rows `pages` mutated: the smallest
            first.
        keys: [P, N, D] model dtype or 8-bit floating point, any strides; all N tokens
            of a page count.
        pages: [M] int64 page ids, in any order, also several times.
    """
    step = max(1, CHUNK_BYTES // max(1, keys[0].numel() * keys.element_size()))
    for some in pages.split(step):
        low, high = keys[some].to(bounds.dtype).aminmax(dim=1)
        bounds[0, some], bounds[1, some] = low, high


def page_scores_ref(
    queries: Tensor, pages: Tensor, counts: Tensor, bounds: Tensor
) -> Tensor:
    """Bound the product of any key on a page with any of a row's queries.

    Args:
        queries: [R, G, D] model dtype, the query heads of each row.
        pages: [R, C] int32 page ids; any valid id after the last.
        counts: [R] int32, leading pages of each row that are scored.
        bounds: [2, P, D] model dtype; see `page_bounds`. Those of pages that are not
            scored are ignored whatever they hold.

    Returns:
        [R, C] float32, max over queries of sum_c max(q_c lo_c, q_c hi_c), summed up in
        float32; the lowest number on pages that are not scored. A row's scores follow
        from its own queries and pages alone.
    """
    group, num_columns, size = queries.shape[1], pages.shape[1], queries.shape[2]
    row_bytes = 4 * num_columns * size * (2 * group + 4)
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    parts = zip(queries.split(step), pages.split(step), strict=True)
    scores = [_scores(query, page, bounds) for query, page in parts]
    column = torch.arange(num_columns, device=pages.device)
    return torch.cat(scores).masked_fill(column >= counts[:, None], LOWEST)


def best_pages_ref(
    tables: Tensor, scores: Tensor, num_global: Tensor, num_read: Tensor
) -> Tensor:
    """Leave out the global pages with the lowest scores; the others keep their order.

    Example: pages [10, 11, 12, 13, 14], of which the first 4 are global with scores
    [0.5, 3, -1, 2]; 2 of them are read: [11, 13, 14].

    Args:
        tables: [R, C] int32 page ids, global ones first; numbers of a row contiguous.
        scores: [R, C] float32, not NaN; ties go to the earlier page. Columns after the
            global pages hold the lowest number.
        num_global: [R] int64, at most C.
        num_read: [R] int64, global pages that stay, at most `num_global`.

    Returns:
        [R, C] int32, pages that are read, with all that come after the global ones; 0
        after the last one.
    """
    num_columns = tables.shape[1]
    step = max(1, CHUNK_BYTES // (SORTED_BYTES * max(1, num_columns)))
    if len(tables) > step:
        rows = tables, scores, num_global, num_read
        parts = zip(*(each.split(step) for each in rows), strict=True)
        return torch.cat([best_pages_ref(*part) for part in parts])
    column = torch.arange(num_columns, device=tables.device).expand(tables.shape)
    rank = ranks_of(scores.argsort(dim=-1, descending=True, stable=True))
    is_read = (rank < num_read[:, None]) | (column >= num_global[:, None])
    place = torch.where(is_read, is_read.cumsum(-1) - 1, num_columns)
    read = tables.new_zeros(len(tables), num_columns + 1).scatter_(-1, place, tables)
    return read[:, :-1]


page_bounds = Operation(page_bounds_ref)
page_scores = Operation(page_scores_ref)
best_pages = Operation(best_pages_ref)


def _scores(queries: Tensor, pages: Tensor, bounds: Tensor) -> Tensor:
    """Return [r, C] float32 of queries [r, G, D] and pages [r, C]."""
    low, high = bounds[:, pages.long()].float()[:, :, None]
    query = queries.float()[:, :, None]
    return (torch.where(query > 0, high, low) * query).sum(-1).amax(1)
