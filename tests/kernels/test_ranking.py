"""The total order and the selections built on it, against sorted() over tokens."""

import math

import pytest
import torch

from vllm_kvpolicy.kernels.ranking import (
    ascending_indices,
    fill_next_best,
    limit_must_keep,
    rank_by,
    ranked_positions,
    ranks_within,
    resize,
    top_k_mask,
)

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0])


def awkward_scores(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """[rows, tokens] float32 with many ties and every special value."""
    generator = torch.Generator().manual_seed(seed)
    return SPECIAL[torch.randint(len(SPECIAL), (rows, tokens), generator=generator)]


def order_of(score: list[float], among: list[int]) -> list[int]:
    """Best to worst: NaN is lowest, the later of equal scores comes first."""
    clean = {i: -math.inf if math.isnan(score[i]) else score[i] for i in among}
    return sorted(among, key=lambda i: (clean[i], i), reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_order(dtype: torch.dtype) -> None:
    score = awkward_scores(8, 60, 0).to(dtype)
    got = ranked_positions(score)
    for r in range(8):
        assert got[r].tolist() == order_of(score[r].tolist(), list(range(60)))


def test_ranks_within_groups() -> None:
    score = awkward_scores(8, 60, 1)
    group = torch.randint(5, (8, 60), generator=torch.Generator().manual_seed(1))
    got = ranks_within(score, group)
    for r in range(8):
        for g in range(5):
            members = (group[r] == g).nonzero().flatten().tolist()
            order = order_of(score[r].tolist(), members)
            assert [int(got[r, i]) for i in order] == list(range(len(order)))


@pytest.mark.parametrize("seed", range(12))
def test_top_k(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = awkward_scores(6, 40, seed)
    lengths = torch.randint(20, 41, (6,), generator=generator)
    valid = torch.arange(40) < lengths[:, None]
    must = (torch.rand(6, 40, generator=generator) < 0.2) & valid
    budget = 20
    must &= must.cumsum(-1) <= budget
    got = top_k_mask(score, must, valid, budget)
    for r in range(6):
        forced = must[r].nonzero().flatten().tolist()
        others = [i for i in range(int(lengths[r])) if i not in forced]
        best = order_of(score[r].tolist(), others)[: budget - len(forced)]
        assert got[r].nonzero().flatten().tolist() == sorted(forced + best)
    assert (got.sum(-1) == budget).all()


def test_fill_continues_the_same_order() -> None:
    score = awkward_scores(5, 50, 3)
    valid = torch.ones(5, 50, dtype=torch.bool)
    none = torch.zeros_like(valid)
    small = top_k_mask(score, none, valid, 13)
    target = torch.tensor([13, 14, 20, 49, 50])
    got = fill_next_best(small, score, valid, target)
    for r in range(5):
        want = top_k_mask(score[r : r + 1], none[:1], valid[:1], int(target[r]))
        assert torch.equal(got[r : r + 1], want)
    assert torch.equal(fill_next_best(small, score, valid, 5), small)


def test_fill_stops_at_the_valid_tokens() -> None:
    valid = torch.arange(10) < torch.tensor([[4], [10]])
    keep = torch.zeros_like(valid)
    got = fill_next_best(keep, torch.rand(2, 10), valid, 7)
    assert got.sum(-1).tolist() == [4, 7]
    assert not (got & ~valid).any()


def test_limit_must_keep_drops_old_recents_first() -> None:
    must = torch.zeros(1, 20, dtype=torch.bool)
    must[0, :4] = True
    must[0, 14:] = True
    assert torch.equal(limit_must_keep(must, 10), must)
    assert limit_must_keep(must, 7).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 17, 18, 19]
    assert limit_must_keep(must, 4).nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    assert limit_must_keep(must, 2).nonzero()[:, 1].tolist() == [0, 1]


def test_ascending_indices() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    got = ascending_indices(mask, 2)
    assert got.tolist() == [[1, 2], [4, -1], [-1, -1]]
    assert ascending_indices(mask, 5)[0].tolist() == [1, 2, 4, -1, -1]
    assert got.dtype == torch.int64


def graded(score: torch.Tensor, grade: torch.Tensor, among: range) -> list[int]:
    """Return tokens best first: by grade, then by score, then the later one."""
    order = order_of(score.tolist(), list(among))
    return sorted(order, key=lambda token: int(grade[token]), reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_resize(seed: int) -> None:
    rows, tokens, page = 6, 40, 4
    generator = torch.Generator().manual_seed(seed)
    score = awkward_scores(rows, tokens, seed)
    pages = torch.randint(1, tokens // page + 1, (rows,), generator=generator)
    keep = torch.rand(rows, tokens, generator=generator) < 0.5
    must = torch.rand(rows, tokens, generator=generator) < 0.2
    quota = torch.randint(0, tokens // page + 1, (rows,), generator=generator)
    got = resize(keep, score, must, pages, quota, page)
    grade = torch.where(must, 2, keep.long())
    for r in range(rows):
        best = graded(score[r], grade[r], range(int(pages[r]) * page))
        want = sorted(best[: int(quota[r]) * page])
        assert got[r].nonzero().flatten().tolist() == want


def test_rank_by() -> None:
    score, generator = awkward_scores(6, 40, 1), torch.Generator().manual_seed(1)
    first = torch.randint(-2, 3, (6, 40), generator=generator)
    got = rank_by(first, score)
    for r in range(6):
        order = graded(score[r], first[r], range(40))
        assert [int(got[r, i]) for i in order] == list(range(40))
