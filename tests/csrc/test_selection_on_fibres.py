"""Selections in CUDA C++, on a CPU, equal their references, token for token.

What nvcc compiles runs here with a fibre per thread; see cuda_on_fibres_library.py.
"""

import math

import pytest
import torch

from support.far_memory import moved_far
from vllm_kvpolicy.kernels.ranking import top_k_mask, top_k_mask_ref
from vllm_kvpolicy.kernels.segment_quota import pick_by_quota, pick_by_quota_ref

pytestmark = pytest.mark.usefixtures("on_fibres")
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# About warps, digits, thread blocks, and one row far beyond them.
LENGTHS = [1, 2, 33, 257, 512, 513, 5000]
BATCH = 32  # groups that a block searches at a time


def rows_of_scores(
    tokens: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[6, tokens]: distinct, tied, special, zeros, nothing finite, very near 1."""
    plain = torch.randn(6, tokens, generator=generator, dtype=torch.float64)
    pick = torch.randint(len(SPECIAL), (6, tokens), generator=generator)
    plain[1] = plain[1].round()
    plain[2] = SPECIAL[pick[2]]
    plain[3] = SPECIAL[3 + pick[3] % 2]
    plain[4] = SPECIAL[2 * (pick[4] % 2)]
    plain[5] = 1 + torch.finfo(dtype).eps * plain[5].mul(2).round()
    return plain.to(dtype)


def masks(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Must-keep and valid tokens: any combination of them occurs."""
    must, valid = (
        torch.rand(shape, generator=generator) < share for share in (0.15, 0.8)
    )
    return must, valid


def assert_top_k(
    score: torch.Tensor,
    must: torch.Tensor,
    valid: torch.Tensor,
    budget: torch.Tensor | int,
) -> None:
    calls = top_k_mask.calls["cuda"]
    got, want = (f(score, must, valid, budget) for f in (top_k_mask, top_k_mask_ref))
    assert top_k_mask.calls["cuda"] == calls + 1
    assert got.dtype == torch.bool and got.shape == want.shape
    assert torch.equal(got, want)


def assert_picks(
    score: torch.Tensor, group: torch.Tensor, quotas: torch.Tensor
) -> None:
    calls = pick_by_quota.calls["cuda"]
    got, want = (f(score, group, quotas) for f in (pick_by_quota, pick_by_quota_ref))
    assert pick_by_quota.calls["cuda"] == calls + 1
    assert got.dtype == torch.bool and got.shape == want.shape
    assert torch.equal(got, want)


# -- top_k_mask ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_top_k(tokens: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    score = rows_of_scores(tokens, generator, dtype)
    must, valid = masks((6, tokens), generator)
    budget = torch.randint(0, tokens + 3, (6,), generator=generator)
    assert_top_k(score, must, valid, budget)


@pytest.mark.parametrize("budget", [-3, 0, 1, 33, 700, 10**12, -(10**12)])
def test_one_budget_for_all_rows(budget: int, generator: torch.Generator) -> None:
    score = rows_of_scores(700, generator)
    must, valid = masks((6, 700), generator)
    valid[0] = False  # nothing to choose from
    valid[1], must[1] = True, False  # everything
    must[2] = True  # nothing but must-keep tokens
    assert_top_k(score, must, valid, budget)


def test_budgets_near_what_must_be_kept_and_near_all(
    generator: torch.Generator,
) -> None:
    must, valid = masks((1, 600), generator)
    budgets = torch.stack([(must & valid).sum(), valid.sum()])
    budgets = torch.cat([budgets - 1, budgets, budgets + 1])
    score = rows_of_scores(600, generator)
    assert_top_k(score, must.expand(6, -1), valid.expand(6, -1), budgets)


@pytest.mark.parametrize("tokens", [300, 5000, 70_001])
def test_of_equal_scores_the_later(tokens: int, generator: torch.Generator) -> None:
    """All digits of a position decide: 8, 16 or 24 bits."""
    nobody = torch.zeros(3, tokens, dtype=torch.bool)
    budget = torch.randint(1, tokens, (3,), generator=generator)
    got = top_k_mask(torch.zeros(3, tokens), nobody, ~nobody, budget)
    assert torch.equal(got, torch.arange(tokens) >= tokens - budget[:, None])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    order = torch.randperm(2**16, generator=generator)
    score = (order - 2**15).to(torch.int16).view(dtype)[None].expand(3, -1)
    nobody = torch.zeros(3, 2**16, dtype=torch.bool)
    # Far up, near zero, and among the infinities and NaNs below.
    budget = torch.tensor([29_000, 32_700, 65_000])
    budget += torch.randint(300, (3,), generator=generator)
    assert_top_k(score, nobody, ~nobody, budget)


def test_any_leading_axes_and_strides(generator: torch.Generator) -> None:
    score = rows_of_scores(48, generator).view(2, 3, 48)
    must, valid = masks((2, 3, 48), generator)
    scattered = [x.repeat_interleave(2, -1)[..., ::2] for x in (score, must)]
    assert not any(x.is_contiguous() for x in scattered)
    budget = torch.randint(0, 50, (3, 2), generator=generator).t()
    assert_top_k(*scattered, valid[:1, :1].expand(2, 3, 48), budget)
    wide = [torch.cat((x, x, x), -1)[..., 48:96] for x in (score, must, valid)]
    assert_top_k(*wide, budget)
    one = [x[0, 0] for x in (score, must, valid)]
    assert_top_k(*one, 9)


def test_neighbours_and_padding_change_nothing(generator: torch.Generator) -> None:
    score = rows_of_scores(100, generator)
    must, valid = masks((6, 100), generator)
    budget = torch.randint(20, 60, (6,), generator=generator)
    want = top_k_mask(score, must, valid, budget)
    for row in range(6):
        one = slice(row, row + 1)
        alone = top_k_mask(score[one], must[one], valid[one], budget[one])
        assert torch.equal(alone, want[one])
    garbage = torch.full((6, 500), math.inf)
    garbage[1], yes = math.nan, torch.ones(6, 500, dtype=torch.bool)
    got = top_k_mask(
        torch.cat((score, garbage), -1),
        torch.cat((must, yes), -1),
        torch.cat((valid, ~yes), -1),
        budget,
    )
    assert torch.equal(got[:, :100], want) and not got[:, 100:].any()


def test_nothing_beside_the_marks_is_written(generator: torch.Generator) -> None:
    score = rows_of_scores(700, generator)
    must, valid = masks((6, 700), generator)
    marks = torch.full((8, 900), 77, dtype=torch.uint8)
    inner = marks[1:-1, 100:800].view(torch.bool)
    torch.ops.vllm_kvpolicy.top_k_mask(inner, score, must, valid, None, 321)
    assert torch.equal(inner, top_k_mask_ref(score, must, valid, 321))
    assert set(inner.view(torch.uint8).flatten().tolist()) == {0, 1}
    inner.view(torch.uint8).fill_(77)
    assert (marks == 77).all()


@pytest.mark.parametrize("far", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_top_k_of_rows_far_apart(
    far: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    score = rows_of_scores(90, generator, dtype)[:3]
    must, valid = masks((3, 90), generator)
    rows = [torch.ones(3, 90, dtype=torch.bool), score, must, valid]
    rows[far] = moved_far(rows[far])
    budgets = torch.tensor([40, 41, 20])
    torch.ops.vllm_kvpolicy.top_k_mask(*rows, budgets, 0)
    assert torch.equal(rows[0], top_k_mask_ref(score, must, valid, budgets))


def test_nothing_to_select() -> None:
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        none = torch.zeros(shape, dtype=torch.bool)
        assert top_k_mask(torch.zeros(shape), none, none, 3).shape == shape


# -- pick_by_quota ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 1), (2, 1), (130, 1), (130, 37), (513, 37), (513, 200), (5000, 200)],
)
def test_picks_of_runs_with_gaps(
    tokens: int, length: int, generator: torch.Generator
) -> None:
    num_groups = min(1 + tokens // length, 90)
    group = (torch.arange(tokens) // length).clamp(max=num_groups - 1).repeat(6, 1)
    exempt = torch.rand(6, tokens, generator=generator) < 0.2
    quotas = torch.randint(0, length + 2, (6, num_groups), generator=generator)
    score = rows_of_scores(tokens, generator)
    assert_picks(score, group.masked_fill(exempt, num_groups), quotas)


@pytest.mark.parametrize(
    ("num_groups", "dtype"),
    [
        (1, torch.float64),
        (4, torch.float16),
        (BATCH - 1, torch.bfloat16),
        (BATCH, torch.float32),
        (BATCH + 1, torch.float64),
        (3 * BATCH, torch.float32),
    ],
)
def test_picks_of_scattered_groups(
    num_groups: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    score = rows_of_scores(1300, generator, dtype)
    group = torch.randint(0, num_groups + 1, score.shape, generator=generator)
    most = 2 * 1300 // num_groups
    quotas = torch.randint(0, most, (6, num_groups), generator=generator)
    quotas[torch.rand(quotas.shape, generator=generator) < 0.3] = 0
    quotas[0, 0], quotas[1, -1], quotas[2, -1] = 10**12, 1, -(10**12)
    assert_picks(score, group, quotas)
    assert_picks(score.t().contiguous().t(), group, quotas)


@pytest.mark.parametrize("tokens", [700, 5000])
def test_picks_of_equal_scores(tokens: int, generator: torch.Generator) -> None:
    group = (torch.arange(tokens) >= 10).long().repeat(3, 1)
    quotas = torch.tensor([[4, 600], [0, 77], [10, tokens]])
    assert_picks(torch.zeros(3, tokens), group, quotas)
    scattered = torch.randint(0, 3, (3, tokens), generator=generator)
    assert_picks(torch.full((3, tokens), math.nan), scattered, quotas)


def test_no_quota_picks_nobody(generator: torch.Generator) -> None:
    score = rows_of_scores(600, generator)
    group = torch.randint(0, 40, score.shape, generator=generator)
    none = torch.zeros(6, 40, dtype=torch.int64)
    for quotas in (none, none - 1):
        assert not pick_by_quota(score, group, quotas).any()
    assert pick_by_quota(score, group, none + 600).all()


def test_rows_and_padding_of_picks(generator: torch.Generator) -> None:
    score = rows_of_scores(600, generator)
    group = torch.randint(0, 5, score.shape, generator=generator)
    quotas = torch.randint(0, 90, (6, 5), generator=generator)
    want = pick_by_quota(score, group, quotas)
    for row in range(6):
        one = slice(row, row + 1)
        alone = pick_by_quota(score[one], group[one], quotas[one])
        assert torch.equal(alone, want[one])
    garbage, nobody = torch.full((6, 300), math.inf), torch.full((6, 300), 5)
    wide = torch.cat((score, garbage), -1), torch.cat((group, nobody), -1)
    got = pick_by_quota(*wide, quotas)
    assert torch.equal(got[:, :600], want) and not got[:, 600:].any()


@pytest.mark.parametrize("far", range(4))
def test_picks_of_rows_far_apart(far: int, generator: torch.Generator) -> None:
    score = rows_of_scores(90, generator)[:3]
    group = torch.randint(0, 4, score.shape, generator=generator)
    quotas = torch.randint(1, 20, (3, 4), generator=generator)
    rows = [torch.ones(3, 90, dtype=torch.bool), score, group, quotas]
    rows[far] = moved_far(rows[far])
    torch.ops.vllm_kvpolicy.pick_by_quota(*rows)
    assert torch.equal(rows[0], pick_by_quota_ref(score, group, quotas))


def test_nothing_to_pick() -> None:
    none = torch.zeros(2, 9, dtype=torch.int64)
    assert not pick_by_quota(torch.ones(2, 9), none, none[:, :0]).any()
    assert pick_by_quota(torch.ones(0, 9), none[:0], none[:0, :1]).shape == (0, 9)
    assert pick_by_quota(torch.ones(2, 0), none[:, :0], none).shape == (2, 0)


# -- refusals --------------------------------------------------------------------------

MASK, SCORE = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 9)
GROUP, QUOTAS = torch.zeros(2, 9).long(), torch.zeros(2, 3).long()


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (0, "marked", MASK.byte()),
        (0, "marked", MASK[:, :8]),
        (0, "marked", MASK.t().contiguous().t()),
        (1, "score", SCORE[0]),
        (1, "score", SCORE.long()),
        (1, "score", SCORE.to(torch.float8_e5m2)),
        (1, "score", SCORE.t().contiguous().t()),
        (2, "must_keep", MASK[:1]),
        (3, "valid", MASK.long()),
        (4, "budgets", torch.zeros(3).long()),
        (4, "budgets", torch.zeros(2).int()),
    ],
)
def test_other_rows_are_refused(place: int, name: str, wrong: torch.Tensor) -> None:
    given = [MASK.clone(), SCORE, MASK, MASK, torch.zeros(2).long(), 0]
    torch.ops.vllm_kvpolicy.top_k_mask(*given)
    given[place] = wrong
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        torch.ops.vllm_kvpolicy.top_k_mask(*given)


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (0, "marked", GROUP),
        (1, "score", SCORE.int()),
        (1, "score", SCORE[0]),
        (2, "group", GROUP.int()),
        (2, "group", GROUP[:, :4]),
        (3, "quotas", QUOTAS[0]),
        (3, "quotas", QUOTAS[:1]),
        (3, "quotas", QUOTAS.t().contiguous().t()),
    ],
)
def test_other_groups_are_refused(place: int, name: str, wrong: torch.Tensor) -> None:
    given = [MASK.clone(), SCORE, GROUP, QUOTAS]
    torch.ops.vllm_kvpolicy.pick_by_quota(*given)
    given[place] = wrong
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        torch.ops.vllm_kvpolicy.pick_by_quota(*given)
