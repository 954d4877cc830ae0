"""Selections and lists in Triton equal their references, index for index.

Operations run in Triton here (see conftest.py). Fresh memory is poisoned: True in masks
and the highest number in integers.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from vllm_kvpolicy.kernels.page_quota import count_in_pages, count_in_pages_ref
from vllm_kvpolicy.kernels.ranking import (
    fill_next_best,
    fill_next_best_ref,
    resize,
    resize_ref,
    top_k_mask,
    top_k_mask_ref,
)
from vllm_kvpolicy.kernels.triton.radix_select import MAX_TILE

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
MANY_TILES = 2 * MAX_TILE + 37
LENGTHS = [1, 2, 127, 130, 300]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, dtype=torch.bool).all()
    yield
    torch.use_deterministic_algorithms(False)


def rows_of_scores(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[6, tokens] float32: distinct, tied, special, zeros, nothing finite, denormal."""
    plain = torch.randn(6, tokens, generator=generator)
    pick = torch.randint(len(SPECIAL), (6, tokens), generator=generator)
    plain[1] = plain[1].round()
    plain[2] = SPECIAL[pick[2]]
    plain[3] = SPECIAL[3 + pick[3] % 2]
    plain[4] = SPECIAL[2 * (pick[4] % 2)]
    plain[5] *= 1e-40
    return plain


def masks(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kept, must-keep and valid tokens: any combination of them occurs."""
    kept, must, valid = (
        torch.rand(shape, generator=generator) < share for share in (0.4, 0.15, 0.8)
    )
    return kept, must, valid


def assert_selects_as_reference(
    score: torch.Tensor,
    kept: torch.Tensor,
    must: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> None:
    for got, want in [
        (
            fill_next_best(kept, score, valid, target),
            fill_next_best_ref(kept, score, valid, target),
        ),
        (
            top_k_mask(score, must, valid, target),
            top_k_mask_ref(score, must, valid, target),
        ),
    ]:
        assert got.dtype == torch.bool and got.shape == want.shape
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_selections(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    score = rows_of_scores(tokens, generator)
    target = torch.randint(0, tokens + 3, (6,), generator=generator)
    assert_selects_as_reference(score, *masks((6, tokens), generator), target)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("tokens", [5, *LENGTHS, MANY_TILES])
def test_whole_pages(tokens: int, page: int) -> None:
    """Sizes beyond what is held, nothing held, and nothing wanted are among them."""
    generator = torch.Generator().manual_seed(tokens)
    score = rows_of_scores(tokens, generator)
    kept, must, _ = masks((6, tokens), generator)
    most = tokens // page + 2
    pages, quota = torch.randint(0, most, (2, 6), generator=generator)
    quota[:2] = torch.tensor([0, most])
    got = resize(kept, score, must, pages, quota, page)
    assert torch.equal(got, resize_ref(kept, score, must, pages, quota, page))
    same = resize(
        *(x.view(2, 3, -1) for x in (kept, score, must)),
        pages.view(2, 3),
        quota.view(2, 3),
        page,
    )
    assert torch.equal(same, got.view(2, 3, -1))
    counts = count_in_pages(kept, pages, page)
    assert torch.equal(counts, count_in_pages_ref(kept, pages, page))


@pytest.mark.parametrize("target", [-3, 0, 1, 33, 70, 10**12])
def test_one_target_for_all_rows(target: int) -> None:
    generator = torch.Generator().manual_seed(target % 101)
    score = rows_of_scores(70, generator)
    kept, must, valid = masks((6, 70), generator)
    valid[0] = False  # nothing to choose from
    valid[1], kept[1], must[1] = True, False, False  # everything
    assert_selects_as_reference(score, kept, must, valid, target)


def test_targets_at_the_edges_of_grades() -> None:
    """Exactly the must-keep tokens, or the kept ones; and one more or less."""
    generator = torch.Generator().manual_seed(5)
    kept, must, valid = masks((1, 90), generator)
    score = torch.randn(1, 90, generator=generator).round()
    first, second = (must & valid).sum(), ((must | kept) & valid).sum()
    targets = torch.stack([first, second, valid.sum(), kept.sum()])
    targets = torch.cat([targets - 1, targets, targets + 1])
    inputs = (x.expand(len(targets), -1) for x in (score, kept, must, valid))
    assert_selects_as_reference(*inputs, targets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_scores(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    score = rows_of_scores(140, generator).to(dtype)
    if dtype == torch.float64:  # differences that float32 does not have
        score[0] = 1 + score[0] * 1e-12
        score[5] *= 1e-270
    target = torch.full((6,), 61)
    assert_selects_as_reference(score, *masks((6, 140), generator), target)


def test_rows_of_many_tiles() -> None:
    generator = torch.Generator().manual_seed(3)
    score = torch.randn(2, MANY_TILES, generator=generator)
    score[1] = 0.0  # ties across tiles: the cut falls into one of them
    kept, must, valid = masks(score.shape, generator)
    target = torch.tensor([MANY_TILES // 2, 3 * MANY_TILES // 5])
    assert_selects_as_reference(score, kept, must, valid, target)


def test_any_leading_axes_and_strides() -> None:
    generator = torch.Generator().manual_seed(4)
    score = rows_of_scores(48, generator).view(2, 3, 48)
    kept, must, valid = masks((2, 3, 48), generator)
    scattered = [x.repeat_interleave(2, -1)[..., ::2] for x in (score, kept, must)]
    assert not any(x.is_contiguous() for x in scattered)
    target = torch.randint(0, 50, (3, 2), generator=generator).t()
    assert_selects_as_reference(*scattered, valid[:1, :1].expand(2, 3, 48), target)
    by_token = score.transpose(1, 2).flatten(1), kept.transpose(1, 2).flatten(1)
    got = fill_next_best(by_token[1], by_token[0], ~by_token[1], 90)
    assert torch.equal(got, fill_next_best_ref(*by_token[::-1], ~by_token[1], 90))


def test_neighbours_and_padding_change_nothing() -> None:
    generator = torch.Generator().manual_seed(6)
    score = rows_of_scores(100, generator)
    _, must, valid = masks((6, 100), generator)
    target = torch.randint(20, 60, (6,), generator=generator)
    want = top_k_mask(score, must, valid, target)
    for row in range(0, 6, 2):
        one = slice(row, row + 1)
        alone = top_k_mask(score[one], must[one], valid[one], target[one])
        assert torch.equal(alone, want[one])
    garbage = torch.full((6, 60), math.inf)
    garbage[1], yes = math.nan, torch.ones(6, 60, dtype=torch.bool)
    got = top_k_mask(
        torch.cat((score, garbage), -1),
        torch.cat((must, yes), -1),
        torch.cat((valid, ~yes), -1),
        target,
    )
    assert torch.equal(got[:, :100], want) and not got[:, 100:].any()


def test_nothing_to_select() -> None:
    none = torch.zeros(0, 5, dtype=torch.bool)
    assert fill_next_best(none, torch.zeros(0, 5), none, 3).shape == (0, 5)
    no_row = torch.zeros(0, dtype=torch.int64)
    assert resize(none, torch.zeros(0, 5), none, no_row, no_row, 3).shape == (0, 5)
