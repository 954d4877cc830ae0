"""Bounds of pages against the keys in them, and scores against loops over channels."""

import pytest
import torch

from vllm_kvpolicy.kernels import page_bounds as module
from vllm_kvpolicy.kernels.page_bounds import (
    LOWEST,
    page_bounds,
    page_bounds_ref,
    page_scores,
    page_scores_ref,
)

PAGES, SIZE, DIM = 40, 6, 5


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def keys(request: pytest.FixtureRequest) -> torch.Tensor:
    """Keys as columns, a part of pages that hold values, too."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(PAGES, 2 * DIM, SIZE, generator=generator).to(request.param)
    return pool[:, :DIM].transpose(1, 2)


@pytest.fixture
def bounds(keys: torch.Tensor) -> torch.Tensor:
    """Bounds of the even pages; of others NaN."""
    made = keys.new_full((2, PAGES, DIM), torch.nan)
    page_bounds(made, keys, torch.arange(0, PAGES, 2))
    return made


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_bounds_are_those_of_every_token(
    keys: torch.Tensor, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    made = keys.new_full((2, PAGES, DIM), torch.nan)
    page_bounds_ref(made, keys, torch.tensor([7, 3, 7, 39]))
    for page in range(PAGES):
        if page not in (3, 7, 39):
            assert made[:, page].isnan().all()
            continue
        for channel in range(DIM):
            column = keys[page, :, channel].tolist()
            assert made[:, page, channel].tolist() == [min(column), max(column)]


def test_bounds_of_no_page(keys: torch.Tensor) -> None:
    made = keys.new_full((2, PAGES, DIM), 7.0)
    page_bounds(made, keys, torch.zeros(0, dtype=torch.int64))
    assert (made == 7).all()


@pytest.mark.parametrize("group", [1, 3])
def test_no_key_of_a_page_beats_its_score(
    keys: torch.Tensor, bounds: torch.Tensor, group: int
) -> None:
    """Every true product is at most the score, and one key alone reaches it."""
    queries = torch.randn(30, group, DIM).to(keys.dtype)
    pages = 2 * torch.randint(PAGES // 2, (30, 4), dtype=torch.int32)
    counts = torch.full((30,), 4, dtype=torch.int32)
    scores = page_scores(queries, pages, counts, bounds)
    wide = keys.double()[pages.long()]
    products = torch.einsum("rgd,rcnd->rcgn", queries.double(), wide)
    assert (scores >= products.flatten(2).amax(-1) - 1e-5).all()
    page_bounds(bounds, keys[:, :1], torch.arange(0, PAGES, 2))
    scores = page_scores(queries, pages, counts, bounds)
    alone = products[..., 0].amax(-1).float()
    torch.testing.assert_close(scores, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_scores_equal_loops(
    keys: torch.Tensor,
    bounds: torch.Tensor,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding and pages of nobody, whose bounds are NaN, do not count."""
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    queries = torch.randn(9, 2, DIM).to(keys.dtype)
    queries[0] = 0
    counts = torch.tensor([4, 0, 1, 2, 3, 4, 4, 2, 1], dtype=torch.int32)
    pages = 2 * torch.randint(PAGES // 2, (9, 4), dtype=torch.int32)
    pages[torch.arange(4) >= counts[:, None]] += 1
    scores = page_scores_ref(queries, pages, counts, bounds)
    low, high = bounds.double()
    for row in range(9):
        for column in range(4):
            if column >= counts[row]:
                assert scores[row, column] == LOWEST
                continue
            page = int(pages[row, column])
            want = max(
                sum(
                    max(float(q) * float(low[page, c]), float(q) * float(high[page, c]))
                    for c, q in enumerate(query)
                )
                for query in queries[row]
            )
            assert scores[row, column].item() == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_a_rows_scores_do_not_depend_on_its_neighbours(bounds: torch.Tensor) -> None:
    queries = torch.randn(7, 3, DIM).to(bounds.dtype)
    pages = 2 * torch.randint(PAGES // 2, (7, 9), dtype=torch.int32)
    counts = torch.arange(3, 10, dtype=torch.int32)
    whole = page_scores(queries, pages, counts, bounds)
    for row in range(7):
        count = int(counts[row])
        one = slice(row, row + 1)
        alone = page_scores(queries[one], pages[one, :count], counts[one], bounds)
        assert torch.equal(alone[0], whole[row, :count])
