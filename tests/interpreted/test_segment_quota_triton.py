"""Segments, quotas and picks in Triton equal their references, number for number.

Operations run in Triton here (see conftest.py). Fresh memory is poisoned: True in masks
and the highest number in integers.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support.rows_of_mass import rows_of_mass
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.kernels.segment_quota import (
    MASS_UNIT,
    SegmentQuotas,
    pick_by_quota,
    pick_by_quota_ref,
    segment_quota,
    segment_quota_ref,
    share_by_mass,
)
from vllm_kvpolicy.kernels.triton.radix_select import GROUP_TILE, MAX_TILE
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, choose, select

GOLDEN = Path(__file__).parents[1] / "golden" / "ams_parity.npz"
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
NO_FLOOR = {"min_segment": 1, "max_segment": 999, "min_quota": 0}
# segment_mass, min_segment, max_segment, min_quota
SHAPES = [
    (0.1, 16, 256, 1),
    (0.02, 3, 10, 2),
    (0.007, 1, 4, 0),
    (0.6, 5, 7, 50),
    (1.0, 1, 13, 3),
    (0.001, 1, 40, 1),
    (0.1, 1, 1, 1),
]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, dtype=torch.bool).all()
    yield
    torch.use_deterministic_algorithms(False)


def assert_same(got: SegmentQuotas, want: SegmentQuotas) -> None:
    for name in ("segments", "segment_of", "quotas"):
        assert getattr(got, name).dtype == torch.int64
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def assert_quotas_as_reference(rows: dict[str, torch.Tensor], **options) -> None:
    got = segment_quota(*rows.values(), **options)
    assert_same(got, segment_quota_ref(*rows.values(), **options))
    assert torch.equal(got.quotas.sum(-1), rows["total"])


@pytest.mark.parametrize("tokens", [1, 2, 130, 400])
@pytest.mark.parametrize("shape", SHAPES)
def test_quotas(tokens: int, shape: tuple[float, int, int, int]) -> None:
    generator = torch.Generator().manual_seed(tokens)
    names = ("segment_mass", "min_segment", "max_segment", "min_quota")
    options = dict(zip(names, shape, strict=True))
    assert_quotas_as_reference(rows_of_mass(tokens, generator), **options)


def test_even_shares() -> None:
    rows = rows_of_mass(200, torch.Generator().manual_seed(1))
    options = {"segment_mass": 0.05, "min_segment": 4, "max_segment": 40}
    assert_quotas_as_reference(rows, **options, min_quota=2, by_mass=False)


def test_rows_of_many_tiles() -> None:
    """Segments, pieces and walks go on across tiles."""
    generator = torch.Generator().manual_seed(2)
    rows = rows_of_mass(2 * MAX_TILE + 77, generator)
    rows = {name: value[:3] for name, value in rows.items()}
    options = {"segment_mass": 0.1, "min_segment": 600, "max_segment": 1500}
    assert_quotas_as_reference(rows, **options, min_quota=8)
    # No threshold: pieces alone, one of them across the border between two tiles.
    options = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 1000}
    assert_quotas_as_reference(rows, **options, min_quota=1)


def test_pieces_of_a_cut_in_an_earlier_tile() -> None:
    tokens = MAX_TILE + 2000
    mass = torch.zeros(1, tokens, dtype=torch.int64)
    mass[0, 700] = MASS_UNIT
    rows = {
        "mass": mass,
        "lengths": torch.tensor([tokens]),
        "exempt": torch.zeros(1, tokens, dtype=torch.bool),
        "total": torch.tensor([500]),
    }
    options = {"segment_mass": 0.6, "min_segment": 1, "max_segment": 1000}
    got = segment_quota(*rows.values(), **options, min_quota=1)
    assert got.segments[0, :7, 0].tolist() == [0, *range(700, tokens, 1000)]
    assert_quotas_as_reference(rows, **options, min_quota=1)


def test_thresholds_round_half_to_even() -> None:
    """Thresholds of 2^26 + 1/2 units round down, 3 * 2^26 + 3/2 up."""
    quarter = MASS_UNIT // 4
    step = (quarter + 0.5) / MASS_UNIT
    mass = torch.zeros(2, 12, dtype=torch.int64)
    mass[0, 2], mass[0, 4] = quarter, quarter + 1
    mass[0, 6], mass[0, 7], mass[0, 9] = quarter, 1, quarter - 2
    mass[1, 2], mass[1, 3], mass[1, 8] = quarter - 1, 1, 3 * quarter
    rows = {
        "mass": mass,
        "lengths": torch.tensor([12, 12]),
        "exempt": torch.zeros(2, 12, dtype=torch.bool),
        "total": torch.tensor([5, 5]),
    }
    got = segment_quota(*rows.values(), segment_mass=step, **NO_FLOOR)
    assert got.segments[0, :, 0].tolist()[:4] == [0, 2, 4, 7]
    assert got.segments[1, :, 0].tolist()[:3] == [0, 3, 8]
    assert_quotas_as_reference(rows, segment_mass=step, **NO_FLOOR)


def test_cuts_at_both_ends() -> None:
    """A cut on the first token moves on by one; a missed threshold cuts the last."""
    mass = torch.zeros(3, 9, dtype=torch.int64)
    mass[0, 0], mass[0, 5] = MASS_UNIT // 2, MASS_UNIT // 2
    mass[1, 3] = MASS_UNIT // 2  # rounding lost the rest
    mass[2, 8] = MASS_UNIT
    rows = {
        "mass": mass,
        "lengths": torch.tensor([9, 7, 9]),
        "exempt": torch.zeros(3, 9, dtype=torch.bool),
        "total": torch.tensor([3, 3, 9]),
    }
    got = segment_quota(*rows.values(), segment_mass=0.45, **NO_FLOOR)
    starts = got.segments[..., 0].tolist()
    assert starts[0][:3] == [0, 1, 5] and starts[1][:3] == [0, 3, 6]
    assert starts[2][:2] == [0, 8]
    assert_quotas_as_reference(rows, segment_mass=0.45, **NO_FLOOR)
    assert_quotas_as_reference(rows, segment_mass=1.0, **NO_FLOOR)


def blocks(mass: list[int], block: int, total: int) -> dict[str, torch.Tensor]:
    """One row of blocks of tokens; the first token of each has all of its mass."""
    row = torch.zeros(1, len(mass), block, dtype=torch.int64)
    row[0, :, 0] = torch.tensor(mass)
    return {
        "mass": row.flatten(1),
        "lengths": torch.tensor([len(mass) * block]),
        "exempt": torch.zeros(1, len(mass) * block, dtype=torch.bool),
        "total": torch.tensor([total]),
    }


@pytest.mark.parametrize(
    ("mass", "total", "floor"),
    [
        ([1, 3, 1, 3], 20, 0),  # shares of 2.5 and 7.5
        ([1, 3, 5, 7], 24, 0),  # 1.5, 4.5, 7.5, 10.5: too much is given
        ([1, 5, 1, 5], 6, 0),  # 0.5 and 2.5: too little
        ([0, 1, 1], 6, 1),  # one too many, taken above the floor
        ([0, 0, 0], 7, 0),  # no mass at all
        ([9, 0, 0, 1], 26, 2),  # the first is full
        ([5, 1, 7, 2, 1], 10, 3),  # floors beyond the budget
        ([5, 1, 7, 2, 1], 3, 3),  # not even one token each
        ([4, 4, 4, 4, 4], 2, 1),  # of equal ones the newest
        ([5, 1, 7, 2, 1], 0, 3),
    ],
)
def test_shares(mass: list[int], total: int, floor: int) -> None:
    scaled = [MASS_UNIT // max(sum(mass), 1) * part for part in mass]
    rows = blocks(scaled, 12, total)
    options = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 12}
    got = segment_quota(*rows.values(), **options, min_quota=floor)
    capacity = torch.full((1, len(mass)), 12)
    want = share_by_mass(capacity, torch.tensor([scaled]), rows["total"], floor)
    assert torch.equal(got.quotas[:, : len(mass)], want)
    assert_quotas_as_reference(rows, **options, min_quota=floor)


def test_float_mass_is_refused() -> None:
    rows = rows_of_mass(9, torch.Generator().manual_seed(0))
    rows["mass"] = rows["mass"].double()
    with pytest.raises(ValueError, match="mass: expected int64 units"):
        segment_quota(*rows.values(), segment_mass=0.1, **NO_FLOOR)


def test_neighbours_padding_and_strides_change_nothing() -> None:
    rows = rows_of_mass(120, torch.Generator().manual_seed(3))
    options = {"segment_mass": 0.1, "min_segment": 4, "max_segment": 40, "min_quota": 1}
    want = segment_quota(*rows.values(), **options)
    one = {name: value[2:3] for name, value in rows.items()}
    alone = segment_quota(*one.values(), **options)
    assert torch.equal(alone.segments, want.segments[2:3])
    assert torch.equal(alone.quotas, want.quotas[2:3])
    padding = torch.arange(120) >= rows["lengths"][:, None]
    rows["exempt"] = torch.where(padding, ~rows["exempt"], rows["exempt"])
    assert_same(segment_quota(*rows.values(), **options), want)
    spread = [x.repeat_interleave(2, -1)[..., ::2] for x in rows.values()]
    assert_same(segment_quota(*spread, **options), want)


def scores(rows: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, tokens] float32: every third row distinct, rounded and special."""
    plain = torch.randn(rows, tokens, generator=generator)
    pick = torch.randint(len(SPECIAL), (rows, tokens), generator=generator)
    plain[1::3] = plain[1::3].round()
    plain[2::3] = SPECIAL[pick[2::3]]
    return plain


def assert_picks_as_reference(
    score: torch.Tensor, group: torch.Tensor, quotas: torch.Tensor
) -> None:
    got = pick_by_quota(score, group, quotas)
    assert got.dtype == torch.bool
    assert torch.equal(got, pick_by_quota_ref(score, group, quotas))


@pytest.mark.parametrize("tokens", [1, 2, 129, 400])
@pytest.mark.parametrize("length", [1, 37, 200])
def test_picks_of_runs_with_gaps(tokens: int, length: int) -> None:
    generator = torch.Generator().manual_seed(tokens + length)
    group = (torch.arange(tokens) // length).clamp(max=4).repeat(3, 1)
    exempt = torch.rand(3, tokens, generator=generator) < 0.2
    quotas = torch.randint(0, length + 2, (3, 5), generator=generator)
    score = scores(3, tokens, generator)
    assert_picks_as_reference(score, group.masked_fill(exempt, 5), quotas)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_picks_of_scattered_groups(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    score = scores(3, GROUP_TILE + 90, generator).to(dtype)
    if dtype == torch.float64:
        score[0] = 1 + score[0] * 1e-12
    group = torch.randint(0, 4, score.shape, generator=generator)
    group[:, 300:] = group[:, 300:].clamp(min=1)  # the first ends early
    quotas = torch.tensor([[30, 0, 150], [3, 90, 10**6], [1, 60, 0]])
    assert_picks_as_reference(score, group, quotas)
    assert_picks_as_reference(score.t().contiguous().t(), group, quotas)


def test_picks_of_long_runs() -> None:
    generator = torch.Generator().manual_seed(9)
    tokens = 2 * GROUP_TILE + 500
    score = scores(2, tokens, generator)
    group = (torch.arange(tokens) >= 10).long().repeat(2, 1)
    assert_picks_as_reference(score, group, torch.tensor([[3, 700], [9, 1400]]))
    # Of equal scores the later: they lie in three tiles.
    quotas = torch.tensor([[4, 1400], [0, 77]])
    assert_picks_as_reference(torch.zeros_like(score), group, quotas)


def test_nothing_to_pick() -> None:
    none = torch.zeros(2, 9, dtype=torch.int64)
    assert not pick_by_quota(torch.ones(2, 9), none, none[:, :0]).any()
    assert pick_by_quota(torch.ones(0, 9), none[:0], none[:0, :1]).shape == (0, 9)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as data:
        return dict(data)


def parameters(
    golden: dict[str, np.ndarray], kind: str, case: int
) -> tuple[int, AMSConfig]:
    columns = map(str, golden[f"{kind}_cols"])
    p = dict(zip(columns, map(float, golden[f"{kind}_params"][case]), strict=True))
    return int(p["K"]), AMSConfig(
        segment_mass=p["delta"],
        min_segment=int(p["Lmin"]),
        max_segment=int(p["Lmax"]),
        min_quota=int(p["qmin"]),
        sinks=int(p["n_sink"]),
        recent=int(p["n_last"]),
        ema_decay=p.get("lam", 0.9),
        ema_mix=p.get("beta", 0.9),
        parity=True,
    )


@pytest.mark.parametrize("case", [0, 1, 14, 31, 53, 59])
def test_the_authors_selections(golden: dict[str, np.ndarray], case: int) -> None:
    budget, config = parameters(golden, "single", case)
    usage, score, keep = (
        torch.from_numpy(golden[f"s{case:03d}_{name}"]) for name in ("u", "g", "keep")
    )
    calls = pick_by_quota.calls["triton"]
    assert torch.equal(select(usage, score, budget, config).keep, keep)
    assert pick_by_quota.calls["triton"] == calls + 1


def test_a_chain_of_the_authors_events(golden: dict[str, np.ndarray]) -> None:
    budget, config = parameters(golden, "chain", 4)
    credit = None
    for event in range(3):
        usage, score, keep = (
            torch.from_numpy(golden[f"c004e{event}_{name}"])
            for name in ("u", "g", "keep")
        )
        got = select(usage, score, budget, config, credit=credit)
        assert torch.equal(got.keep, keep)
        credit = got.credit


@pytest.mark.parametrize("name", ["default", "code"])
def test_a_whole_choice(name: str) -> None:
    generator = torch.Generator().manual_seed(11)
    usage = torch.rand(3, 700, generator=generator) ** 8
    lengths = torch.tensor([700, 612, 401])
    position = torch.arange(700)
    recent = (position >= lengths[:, None] - 32) & (position < lengths[:, None])
    must_keep = (position < 4) | recent
    credit = torch.rand(3, 700, generator=generator) / 700
    inputs = (usage, scores(3, 700, generator), must_keep, lengths, 200)
    got = choose(*inputs, PRESETS[name], credit)
    with forced("reference"):
        want = choose(*inputs, PRESETS[name], credit)
    for field in ("keep", "segments", "quotas"):
        assert torch.equal(getattr(got, field), getattr(want, field))
    assert (got.keep.sum(-1) == 200).all()
