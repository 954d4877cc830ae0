"""Selections, segments and quotas in C++ equal their references, number for number.

Fresh memory is poisoned: True in masks and the highest number in integers.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.rows_of_mass import rows_of_mass
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.kernels.ranking import fill_next_best, top_k_mask
from vllm_kvpolicy.kernels.segment_quota import (
    pick_by_quota,
    segment_quota,
)
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, choose, select

GOLDEN = Path(__file__).parents[1] / "golden" / "ams_parity.npz"
SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
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


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, dtype=torch.bool).all()
    yield
    torch.use_deterministic_algorithms(False)


def both(operation: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return what the twin and what the reference make of the same arguments."""
    before = operation.calls["cpu"]
    with forced("cpu"):
        got = operation(*args, **kwargs)
    assert operation.calls["cpu"] == before + 1
    return got, operation.reference(*args, **kwargs)


def scores(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[6, tokens] float32: distinct, tied, special, zeros, nothing finite, denormal."""
    plain = torch.randn(6, tokens, generator=generator)
    pick = torch.randint(len(SPECIAL), (6, tokens), generator=generator)
    plain[1] = plain[1].round()
    plain[2] = SPECIAL[pick[2]]
    plain[3] = SPECIAL[3 + pick[3] % 2]
    plain[4] = SPECIAL[2 * (pick[4] % 2)]
    plain[5] *= 1e-40
    return plain


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 2, 37, 300])
def test_the_best_are_the_references(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    score = scores(tokens, generator).to(dtype)
    if dtype == torch.float64:
        score[0] = 1 + score[0] * 1e-12
    keep, valid = (
        torch.rand(score.shape, generator=generator) < share for share in (0.3, 0.8)
    )
    each = torch.randint(0, tokens + 2, (6,), generator=generator)
    for target in (0, tokens // 2, tokens, each):
        got, want = both(fill_next_best, keep, score, valid, target)
        assert torch.equal(got, want)
        got, want = both(top_k_mask, score, keep, valid, target)
        assert torch.equal(got, want)
    spread = [x.repeat_interleave(2, -1)[:, ::2] for x in (score, keep, valid)]
    got, want = both(top_k_mask, *spread, each)
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(), (1, 1, 1), (1, 2, 1), (1, 2, 3)])
def test_targets_may_be_broadcast(shape: tuple[int, ...]) -> None:
    score = torch.randn(1, 2, 3, 40)
    every = torch.ones_like(score, dtype=torch.bool)
    target = torch.randint(1, 40, shape, dtype=torch.int32)
    found, expected = both(top_k_mask, score, ~every, every, target)
    assert torch.equal(found, expected)


def test_axes_in_front_may_be_any() -> None:
    generator = torch.Generator().manual_seed(4)
    score = torch.randn(2, 3, 1, 50, generator=generator).expand(2, 3, 2, 50)
    must_keep = torch.rand(score.shape, generator=generator) < 0.1
    valid = torch.ones(score.shape, dtype=torch.bool)
    size = torch.tensor([[[20]], [[30]]]).expand(2, 3, 2)
    got, want = both(top_k_mask, score, must_keep, valid, size)
    assert torch.equal(got, want) and torch.equal(got.sum(-1), size)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 37, 200])
def test_picks_are_the_references(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    score = scores(400, generator).to(dtype)
    runs = (torch.arange(400) // length).clamp(max=4).repeat(6, 1)
    scattered = torch.randint(0, 4, score.shape, generator=generator)
    exempt = torch.rand(score.shape, generator=generator) < 0.2
    quotas = torch.randint(0, length + 2, (6, 5), generator=generator)
    for group in (runs, scattered):
        group = group.masked_fill(exempt, 5)
        got, want = both(pick_by_quota, score, group, quotas)
        assert torch.equal(got, want)
    nowhere = torch.zeros_like(group)
    got, want = both(pick_by_quota, score, nowhere, quotas[:, :0])
    assert not got.any() and not want.any()


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 129, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_mass", [True, False], ids=["mass", "even"])
def test_quotas_are_the_references(tokens: int, shape: tuple, by_mass: bool) -> None:
    rows = rows_of_mass(tokens, torch.Generator().manual_seed(tokens))
    options = dict(zip(NAMES, shape, strict=True))
    got, want = both(segment_quota, *rows.values(), **options, by_mass=by_mass)
    for name in ("segments", "quotas", "segment_of"):
        assert getattr(got, name).dtype == torch.int64
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.quotas.sum(-1), rows["total"])


@pytest.mark.parametrize("floor", [0, 1, 2, 3, 12])
def test_shares_of_blocks(floor: int) -> None:
    """Shares that round to halves, no mass, equal masses, floors beyond the budget."""
    parts = torch.tensor(
        [[1, 3, 1, 3], [1, 3, 5, 7], [0, 0, 0, 0], [9, 0, 0, 1], [4, 4, 4, 4]]
    )
    mass = torch.zeros(5, 4, 12, dtype=torch.int64)
    mass[..., 0] = parts * (2**28 // parts.sum(-1, keepdim=True).clamp(min=1))
    lengths = torch.full((5,), 48)
    exempt = torch.zeros(5, 48, dtype=torch.bool)
    for total in (0, 2, 3, 7, 20, 24, 26, 48):
        rows = mass.flatten(1), lengths, exempt, torch.full((5,), total)
        shape = {"segment_mass": 1.0, "min_segment": 1, "max_segment": 12}
        got, want = both(segment_quota, *rows, **shape, min_quota=floor)
        assert torch.equal(got.quotas, want.quotas)


def test_mass_of_floating_point_is_refused() -> None:
    rows = rows_of_mass(9, torch.Generator().manual_seed(0))
    rows["mass"] = rows["mass"].double()
    options = dict(zip(NAMES, SHAPES[0], strict=True))
    with (
        pytest.raises(ValueError, match="mass: expected int64 units"),
        forced("cpu"),
    ):
        segment_quota(*rows.values(), **options)


@pytest.mark.parametrize("case", range(60))
def test_the_authors_selections(case: int) -> None:
    with np.load(GOLDEN, allow_pickle=False) as golden:
        columns = map(str, golden["single_cols"])
        values = map(float, golden["single_params"][case])
        p = dict(zip(columns, values, strict=True))
        usage, score, keep = (
            torch.from_numpy(golden[f"s{case:03d}_{name}"])
            for name in ("u", "g", "keep")
        )
    config = AMSConfig(
        segment_mass=p["delta"],
        min_segment=int(p["Lmin"]),
        max_segment=int(p["Lmax"]),
        min_quota=int(p["qmin"]),
        sinks=int(p["n_sink"]),
        recent=int(p["n_last"]),
        parity=True,
    )
    with forced("cpu"):
        assert torch.equal(select(usage, score, int(p["K"]), config).keep, keep)


@pytest.mark.parametrize("name", ["default", "code"])
@pytest.mark.parametrize("seed", range(5))
def test_a_whole_choice(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    usage = torch.rand(6, 700, generator=generator) ** 8
    lengths = torch.tensor([700, 612, 401, 300, 640, 699])
    position = torch.arange(700)
    recent = (position >= lengths[:, None] - 32) & (position < lengths[:, None])
    must_keep = (position < 4) | recent
    credit = torch.rand(6, 700, generator=generator) / 700
    inputs = (usage, scores(700, generator), must_keep, lengths, 200)
    chosen = []
    for which in ("cpu", "reference"):
        with forced(which):
            chosen.append(choose(*inputs, PRESETS[name], credit))
    got, want = chosen
    for field in ("keep", "segments", "quotas", "credit", "mass"):
        assert torch.equal(getattr(got, field), getattr(want, field)), field
    assert (got.keep.sum(-1) == 200).all()
