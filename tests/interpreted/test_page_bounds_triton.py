"""Bounds and scores of pages in Triton, against the references."""

import pytest
import torch

from support.twins_and_references import check_call
from vllm_kvpolicy.kernels.page_bounds import (
    LOWEST,
    best_pages,
    page_bounds,
    page_scores,
)
from vllm_kvpolicy.kernels.triton import page_bounds as module

SHAPES = [(1, 1, 1), (5, 32, 32), (40, 16, 80), (9, 3, 128), (7, 33, 256)]


def draw_pool(pages: int, slots: int, dim: int, columns: bool) -> torch.Tensor:
    """Return keys [P, N, D], a part of pages that hold values, too."""
    generator = torch.Generator().manual_seed(pages)
    if columns:
        pool = torch.randn(pages, 2 * dim, slots, generator=generator)
        return pool[:, :dim].transpose(1, 2)
    return torch.randn(pages, slots, 2 * dim, generator=generator)[..., :dim]


@pytest.mark.parametrize(("pages", "slots", "dim"), SHAPES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bounds(
    pages: int, slots: int, dim: int, columns: bool, dtype: torch.dtype
) -> None:
    """Exact; pages that are not listed keep theirs."""
    keys = draw_pool(pages, slots, dim, columns).to(dtype)
    listed = torch.randint(pages, (pages // 2 + 1,))
    both = keys.new_full((2, 2, pages, dim), 77.0)
    page_bounds(both[0], keys, listed)
    page_bounds.reference(both[1], keys, listed)
    assert torch.equal(*both)
    rest = torch.ones(pages, dtype=torch.bool)
    rest[listed] = False
    assert (both[0][:, rest] == 77).all()


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("pages", "slots", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scores(
    pages: int, slots: int, dim: int, group: int, dtype: torch.dtype
) -> None:
    """To the rounding of a float32 sum; NaN of other pages is not read."""
    generator = torch.Generator().manual_seed(dim + group)
    columns, rows = 2 * slots + 70, 6
    bounds = torch.randn(2, pages + 1, dim, generator=generator).to(dtype)
    bounds = bounds.sort(dim=0).values
    bounds[:, pages] = torch.nan
    queries = torch.randn(rows, group, dim, generator=generator).to(dtype)
    counts = torch.tensor([columns, 0, 1, 63, 64, 65], dtype=torch.int32)
    shape = rows, columns + 5
    tables = torch.randint(pages, shape, generator=generator, dtype=torch.int32)
    tables[torch.arange(columns + 5) >= counts[:, None]] = pages
    given = queries, tables[:, :columns], counts, bounds
    got, want = page_scores(*given), page_scores.reference(*given)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    behind = torch.arange(columns) >= counts[:, None]
    assert (got[behind] == LOWEST).all() and (got[~behind] > LOWEST).all()


@pytest.mark.parametrize("columns", [1, 5, 300, module.COLUMNS, 2 * module.COLUMNS + 9])
@pytest.mark.parametrize("kind", ["all different", "ties", "zeros"])
def test_best_pages(columns: int, kind: str) -> None:
    """Exact: scores are compared, not added up."""
    generator = torch.Generator().manual_seed(columns)
    rows = 12 if columns < module.COLUMNS else 6
    tables = torch.randint(2**30, (rows, columns + 3), generator=generator).int()
    tables = tables[:, :columns]
    scores = torch.randn(rows, columns, generator=generator) * 10
    if kind == "ties":
        scores = scores.div(4, rounding_mode="trunc")
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    num_global = torch.randint(columns + 1, (rows,), generator=generator)
    num_global[:4] = columns
    num_read = (num_global * torch.rand(rows, generator=generator)).long()
    num_read[[0, 4]], num_read[[1, 5]] = num_global[[0, 4]], 0
    num_read[2] = min(1, columns)
    scores[2, 0] = -torch.inf
    scores[torch.arange(columns) >= num_global[:, None]] = LOWEST
    scores[[0, 4]] = LOWEST  # rows that read all are not scored
    check_call(best_pages, tables, scores, num_global, num_read)
