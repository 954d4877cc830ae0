"""Tests of selections, segments and quotas, which twins in C++ and in Triton pass.

Files of tests import all of them and say which twins run. These equal their references,
number for number.
"""

import math
import os
from typing import Any

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from support.twins_and_references import check_call
from vllm_kvpolicy.kernels.ranking import fill_next_best, resize, top_k_mask
from vllm_kvpolicy.kernels.segment_quota import (
    MASS_UNIT,
    pick_by_quota,
    segment_quota,
    to_fixed_point,
)
from vllm_kvpolicy.kernels.triton.ranking import GROUP_TILE, MAX_TILE
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSOptions, choose


def rows_of_mass(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Six rows: flat, uneven, on few tokens, on the first, on the last, sparse."""
    mass = torch.rand(6, tokens, generator=generator, dtype=torch.float64)
    mass **= torch.tensor([[0], [3], [40], [1], [1], [1]])
    mass[3, 1:] *= 1e-4
    lengths = torch.randint(1, tokens + 1, (6,), generator=generator)
    lengths[1] = tokens
    position = torch.arange(tokens)
    mass[4] *= torch.where(position == lengths[4] - 1, 1, 1e-3)
    mass[5] *= torch.rand(tokens, generator=generator) < 0.1
    valid = position < lengths[:, None]
    mass = (mass + 1e-12).masked_fill(~valid, 0)
    exempt = torch.rand(6, tokens, generator=generator) < 0.25
    exempt[2] = False
    exempt[5] |= True
    room = (valid & ~exempt).sum(-1)
    share = torch.tensor([0.5, 1.0, 0.1, 0.0, 0.9, 0.5], dtype=torch.float64)
    return {
        "mass": to_fixed_point(mass / mass.sum(-1, keepdim=True)),
        "lengths": lengths,
        "exempt": exempt,
        "total": (share * room).long(),
    }


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MANY_TILES = 2 * MAX_TILE + 37
NAMES = ("segment_mass", "min_segment", "max_segment", "min_quota")
SHAPES = [
    (0.1, 16, 256, 1),
    (0.02, 3, 10, 2),
    (0.007, 1, 4, 0),
    (0.6, 5, 7, 50),
    (1.0, 1, 13, 3),
    (0.001, 1, 40, 1),
    (0.1, 1, 1, 1),
]
NO_FLOOR = {"min_segment": 1, "max_segment": 999, "min_quota": 0}
Rows = dict[str, torch.Tensor]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(tokens: int, generator: torch.Generator, rows: int = 6) -> torch.Tensor:
    """[rows, tokens] float32: distinct, tied, special, zeros, infinite, denormal."""
    plain = torch.randn(6, tokens, generator=generator)
    pick = torch.randint(len(SPECIAL), (6, tokens), generator=generator)
    plain[1] = plain[1].round()
    plain[2] = SPECIAL[pick[2]]
    plain[3] = SPECIAL[3 + pick[3] % 2]
    plain[4] = SPECIAL[2 * (pick[4] % 2)]
    plain[5] *= 1e-40
    return plain[:rows]


def masks(
    shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Kept, must-keep and valid tokens: any combination of them occurs."""
    kept, must, valid = (
        torch.rand(shape, generator=generator) < share for share in (0.4, 0.15, 0.8)
    )
    return kept, must, valid


def check_best(
    score: torch.Tensor,
    kept: torch.Tensor,
    must: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> None:
    check_call(fill_next_best, kept, score, valid, target)
    check_call(top_k_mask, score, must, valid, target)


# -- selections ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 2, 37, 300])
def test_the_best(tokens: int, dtype: torch.dtype) -> None:
    generator = draw(tokens)
    score = scores(tokens, generator).to(dtype)
    if dtype == torch.float64:  # differences that float32 does not have
        score[0] = 1 + score[0] * 1e-12
        score[5] *= 1e-270
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1":
        score[5] = score[1]  # the interpreter makes its denormal numbers zeros
    each = torch.randint(0, tokens + 3, (6,), generator=generator)
    check_best(score, *masks((6, tokens), generator), each)


@pytest.mark.parametrize("target", [-3, 33, 10**12])
def test_one_target_for_all_rows(target: int) -> None:
    generator = draw(target % 101)
    score = scores(70, generator)
    kept, must, valid = masks((6, 70), generator)
    valid[0] = False  # nothing to choose from
    valid[1], kept[1], must[1] = True, False, False  # everything
    check_best(score, kept, must, valid, target)


def test_targets_at_the_edges_of_grades() -> None:
    """Exactly the must-keep tokens, or the kept ones; and one more or less."""
    generator = draw(5)
    kept, must, valid = masks((1, 90), generator)
    score = torch.randn(1, 90, generator=generator).round()
    first, second = (must & valid).sum(), ((must | kept) & valid).sum()
    targets = torch.stack([first, second, valid.sum(), kept.sum()])
    targets = torch.cat([targets - 1, targets, targets + 1])
    inputs = (x.expand(len(targets), -1) for x in (score, kept, must, valid))
    check_best(*inputs, targets)


def test_rows_of_many_tiles() -> None:
    generator = draw(3)
    score = torch.randn(2, MANY_TILES, generator=generator)
    score[1] = 0.0  # ties across tiles: the cut falls into one of them
    target = torch.tensor([MANY_TILES // 2, 3 * MANY_TILES // 5])
    check_best(score, *masks(score.shape, generator), target)


@pytest.mark.parametrize("shape", [(), (1, 3), (2, 3)])
def test_any_leading_axes_and_strides(shape: tuple[int, ...]) -> None:
    generator = draw(4)
    score = scores(48, generator).view(2, 3, 48)
    kept, must, valid = masks((2, 3, 48), generator)
    scattered = [x.repeat_interleave(2, -1)[..., ::2] for x in (score, kept, must)]
    assert not any(x.is_contiguous() for x in scattered)
    target = torch.randint(0, 50, shape[::-1], generator=generator).int()
    target = target.permute(tuple(reversed(range(len(shape)))))
    check_best(*scattered, valid[:1, :1].expand(2, 3, 48), target)
    by_token = score.transpose(1, 2).flatten(1), kept.transpose(1, 2).flatten(1)
    check_call(fill_next_best, by_token[1], by_token[0], ~by_token[1], 90)


def test_neighbours_and_padding_of_selections_change_nothing() -> None:
    generator = draw(6)
    score = scores(100, generator)
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


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("tokens", [1, 5, 127, MANY_TILES])
def test_whole_pages(tokens: int, page: int) -> None:
    """Sizes beyond what is held, nothing held, and nothing wanted are among them."""
    generator = draw(tokens)
    rows = 2 if tokens == MANY_TILES else 6
    score = scores(tokens, generator, rows)
    kept, must, _ = masks((rows, tokens), generator)
    most = tokens // page + 2
    pages, quota = torch.randint(0, most, (2, rows), generator=generator)
    quota[:2] = torch.tensor([0, most])
    got = check_call(resize, kept, score, must, pages, quota, page)
    same = resize(
        *(x.view(2, rows // 2, -1) for x in (kept, score, must)),
        pages.view(2, -1),
        quota.view(2, -1),
        page,
    )
    assert torch.equal(same, got.view(2, rows // 2, -1))


def test_nothing_to_select() -> None:
    none = torch.zeros(0, 5, dtype=torch.bool)
    assert fill_next_best(none, torch.zeros(0, 5), none, 3).shape == (0, 5)
    no_row = torch.zeros(0, dtype=torch.int64)
    assert resize(none, torch.zeros(0, 5), none, no_row, no_row, 3).shape == (0, 5)


# -- segments and quotas ---------------------------------------------------------------


def check_quotas(rows: Rows, **options: Any) -> Any:
    got = check_call(segment_quota, *rows.values(), **options)
    assert torch.equal(got.quotas.sum(-1), rows["total"])
    return got


def rows_of(mass: torch.Tensor, total: list[int], lengths: list[int]) -> Rows:
    """Rows without exempt tokens."""
    exempt = torch.zeros(mass.shape, dtype=torch.bool)
    rest = torch.tensor(lengths), exempt, torch.tensor(total)
    return dict(zip(("mass", "lengths", "exempt", "total"), (mass, *rest), strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_mass", [True, False], ids=["mass", "even"])
def test_quotas(tokens: int, shape: tuple, by_mass: bool) -> None:
    options = dict(zip(NAMES, shape, strict=True))
    check_quotas(rows_of_mass(tokens, draw(tokens)), **options, by_mass=by_mass)


def test_segments_of_many_tiles() -> None:
    """Segments, pieces and walks go on across tiles."""
    rows = rows_of_mass(2 * MAX_TILE + 77, draw(2))
    rows = {name: value[:3] for name, value in rows.items()}
    options = {"segment_mass": 0.1, "min_segment": 600, "max_segment": 1500}
    check_quotas(rows, **options, min_quota=8)
    # No threshold: pieces alone, one of them across the border between two tiles.
    options = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 1000}
    check_quotas(rows, **options, min_quota=1)


def test_pieces_of_a_cut_in_an_earlier_tile() -> None:
    tokens = MAX_TILE + 2000
    mass = torch.zeros(1, tokens, dtype=torch.int64)
    mass[0, 700] = MASS_UNIT
    options = {"segment_mass": 0.6, "min_segment": 1, "max_segment": 1000}
    got = check_quotas(rows_of(mass, [500], [tokens]), **options, min_quota=1)
    assert got.segments[0, :7, 0].tolist() == [0, *range(700, tokens, 1000)]


def test_thresholds_round_half_to_even() -> None:
    """Thresholds of 2^26 + 1/2 units round down, 3 * 2^26 + 3/2 up."""
    quarter = MASS_UNIT // 4
    step = (quarter + 0.5) / MASS_UNIT
    mass = torch.zeros(2, 12, dtype=torch.int64)
    mass[0, 2], mass[0, 4] = quarter, quarter + 1
    mass[0, 6], mass[0, 7], mass[0, 9] = quarter, 1, quarter - 2
    mass[1, 2], mass[1, 3], mass[1, 8] = quarter - 1, 1, 3 * quarter
    rows = rows_of(mass, [5, 5], [12, 12])
    got = check_quotas(rows, segment_mass=step, **NO_FLOOR)
    assert got.segments[0, :, 0].tolist()[:4] == [0, 2, 4, 7]
    assert got.segments[1, :, 0].tolist()[:3] == [0, 3, 8]


def test_cuts_at_both_ends() -> None:
    """A cut on the first token moves on by one; a missed threshold cuts the last."""
    mass = torch.zeros(3, 9, dtype=torch.int64)
    mass[0, 0], mass[0, 5] = MASS_UNIT // 2, MASS_UNIT // 2
    mass[1, 3] = MASS_UNIT // 2  # rounding lost the rest
    mass[2, 8] = MASS_UNIT
    rows = rows_of(mass, [3, 3, 9], [9, 7, 9])
    starts = check_quotas(rows, segment_mass=0.45, **NO_FLOOR).segments[..., 0]
    assert starts[0, :3].tolist() == [0, 1, 5] and starts[1, :3].tolist() == [0, 3, 6]
    assert starts[2, :2].tolist() == [0, 8]
    check_quotas(rows, segment_mass=1.0, **NO_FLOOR)


@pytest.mark.parametrize("floor", [0, 1, 3])
def test_shares_of_segments(floor: int) -> None:
    """Shares that round to halves, no mass, a full segment, equals, floors too high."""
    parts = torch.tensor(
        [[1, 3, 1, 3], [1, 3, 5, 7], [0, 0, 0, 0], [9, 0, 0, 1], [4, 4, 4, 4]]
    )
    mass = torch.zeros(5, 4, 12, dtype=torch.int64)
    mass[..., 0] = parts * (MASS_UNIT // parts.sum(-1, keepdim=True).clamp(min=1))
    options = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 12}
    for total in (3, 20, 26):
        rows = rows_of(mass.flatten(1), [total] * 5, [48] * 5)
        check_quotas(rows, **options, min_quota=floor)


def test_float_mass_is_refused() -> None:
    rows = rows_of_mass(9, draw(0))
    rows["mass"] = rows["mass"].double()
    with pytest.raises(ValueError, match="mass: expected int64 units"):
        segment_quota(*rows.values(), segment_mass=0.1, **NO_FLOOR)


def test_neighbours_padding_and_strides_of_segments_change_nothing() -> None:
    rows = {name: value[:3] for name, value in rows_of_mass(120, draw(3)).items()}
    options = {"segment_mass": 0.1, "min_segment": 4, "max_segment": 40, "min_quota": 1}
    want = segment_quota(*rows.values(), **options)
    one = {name: value[2:3] for name, value in rows.items()}
    alone = segment_quota(*one.values(), **options)
    assert torch.equal(alone.segments, want.segments[2:3])
    assert torch.equal(alone.quotas, want.quotas[2:3])
    padding = torch.arange(120) >= rows["lengths"][:, None]
    rows["exempt"] = torch.where(padding, ~rows["exempt"], rows["exempt"])
    spread = [x.repeat_interleave(2, -1)[..., ::2] for x in rows.values()]
    for given in (rows.values(), spread):
        got = segment_quota(*given, **options)
        for name in ("segments", "segment_of", "quotas"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


# -- picks -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 129, 400])
@pytest.mark.parametrize("length", [1, 37, 200])
def test_picks_of_runs_with_gaps(tokens: int, length: int) -> None:
    generator = draw(tokens + length)
    group = (torch.arange(tokens) // length).clamp(max=4).repeat(3, 1)
    exempt = torch.rand(3, tokens, generator=generator) < 0.2
    quotas = torch.randint(0, length + 2, (3, 5), generator=generator)
    score = scores(tokens, generator, 3)
    check_call(pick_by_quota, score, group.masked_fill(exempt, 5), quotas)


@pytest.mark.parametrize("dtype", FLOATS)
def test_picks_of_scattered_groups(dtype: torch.dtype) -> None:
    generator = draw(8)
    score = scores(GROUP_TILE + 90, generator, 3).to(dtype)
    if dtype == torch.float64:
        score[0] = 1 + score[0] * 1e-12
    group = torch.randint(0, 4, score.shape, generator=generator)
    group[:, 300:] = group[:, 300:].clamp(min=1)  # the first ends early
    quotas = torch.tensor([[30, 0, 150], [3, 90, 10**6], [1, 60, 0]])
    check_call(pick_by_quota, score, group, quotas)
    if dtype == torch.float32:
        check_call(pick_by_quota, score.t().contiguous().t(), group, quotas)


def test_picks_of_long_runs() -> None:
    tokens = 2 * GROUP_TILE + 500
    score = scores(tokens, draw(9), 2)
    group = (torch.arange(tokens) >= 10).long().repeat(2, 1)
    check_call(pick_by_quota, score, group, torch.tensor([[3, 700], [9, 1400]]))
    # Of equal scores the later: they lie in three tiles.
    quotas = torch.tensor([[4, 1400], [0, 77]])
    check_call(pick_by_quota, torch.zeros_like(score), group, quotas)


def test_nothing_to_pick() -> None:
    none = torch.zeros(2, 9, dtype=torch.int64)
    assert not pick_by_quota(torch.ones(2, 9), none, none[:, :0]).any()
    assert pick_by_quota(torch.ones(0, 9), none[:0], none[:0, :1]).shape == (0, 9)


# -- what they make together -----------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "code"])
def test_a_whole_choice(name: str) -> None:
    generator = draw(11)
    usage = torch.rand(3, 400, generator=generator) ** 8
    lengths = torch.tensor([400, 312, 251])
    position = torch.arange(400)
    recent = (position >= lengths[:, None] - 32) & (position < lengths[:, None])
    must_keep = (position < 4) | recent
    credit = torch.rand(3, 400, generator=generator) / 400
    inputs = (usage, scores(400, generator, 3), must_keep, lengths, 200)
    got = choose(*inputs, AMSOptions(**PRESETS[name]), credit)
    with forced("reference"):
        want = choose(*inputs, AMSOptions(**PRESETS[name]), credit)
    for field in ("keep", "segments", "quotas", "credit", "mass"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert (got.keep.sum(-1) == 200).all()
