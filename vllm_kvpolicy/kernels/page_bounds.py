"""Bounds the keys of each page, and with them the scores of a query on that page.

Source: Quest (arXiv 2406.10774) section 3. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.dispatch import Operation

LOWEST = torch.finfo(torch.float32).min


def page_bounds_ref(
    bounds: torch.Tensor, keys: torch.Tensor, pages: torch.Tensor
) -> None:
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
    queries: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
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


page_bounds = Operation(page_bounds_ref)
page_scores = Operation(page_scores_ref)


def _scores(
    queries: torch.Tensor, pages: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return [r, C] float32 of queries [r, G, D] and pages [r, C]."""
    low, high = bounds[:, pages.long()].float()[:, :, None]
    query = queries.float()[:, :, None]
    return (torch.where(query > 0, high, low) * query).sum(-1).amax(1)
