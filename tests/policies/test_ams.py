"""AMS as served: against loops over tokens, and properties that must always hold."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support import brute_ams
from support.sweeps import trials
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, choose, select

DEFAULT = AMSConfig()
KINDS = ("random", "sinky", "zeros", "one_hot", "flat", "ties", "nan")


def changed(config: AMSConfig, **values: Any) -> AMSConfig:
    return AMSConfig(**{**config.model_dump(), **values})


def make_usage(kind: str, rows: int, tokens: int, seed: int) -> Tensor:
    """[rows, tokens] float32 of a kind that strains one part of the algorithm."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(rows, tokens, generator=generator) ** 4
    hot = torch.randint(tokens, (rows, 1), generator=generator)
    usage = {
        "random": base,
        "sinky": torch.where(torch.arange(tokens) < 2, 50.0, base),
        "zeros": torch.zeros(rows, tokens),
        "one_hot": torch.zeros(rows, tokens).scatter_(-1, hot, 1.0),
        "flat": torch.ones(rows, tokens),
        "ties": (base * 4).round() / 4,
        "nan": base.masked_fill(base < 0.01, torch.nan),
    }
    return usage[kind]


@st.composite
def configs(draw: st.DrawFn) -> AMSConfig:
    low = draw(st.integers(1, 24))
    return AMSConfig(
        segment_mass=draw(st.sampled_from([0.007, 0.02, 0.1, 0.25, 0.3, 0.6, 0.95])),
        min_segment=low,
        max_segment=draw(st.integers(low, 64)),
        min_quota=draw(st.integers(0, 6)),
        sinks=draw(st.integers(0, 6)),
        recent=draw(st.integers(0, 40)),
        ema_decay=draw(st.sampled_from([0.0, 0.5, 0.9])),
        ema_mix=draw(st.sampled_from([0.0, 0.7, 1.0])),
        quotas=draw(st.sampled_from(["mass", "mass", "uniform"])),
        segments=draw(st.sampled_from(["mass", "mass", "fixed"])),
        fixed_segment=draw(st.integers(1, 64)),
    )


@settings(max_examples=trials(250), deadline=None, derandomize=True)
@given(
    config=configs(),
    tokens=st.integers(1, 160),
    share=st.floats(0, 1),
    usage_kind=st.sampled_from(KINDS),
    score_kind=st.sampled_from(KINDS),
    has_credit=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equals_loops_over_tokens(
    config: AMSConfig,
    tokens: int,
    share: float,
    usage_kind: str,
    score_kind: str,
    has_credit: bool,
    seed: int,
) -> None:
    rows, budget = 4, max(1, round(share * tokens))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(budget, tokens + 1, (rows,), generator=generator)
    usage = make_usage(usage_kind, rows, tokens, seed)
    score = make_usage(score_kind, rows, tokens, seed + 1)
    valid = torch.arange(tokens) < lengths[:, None]
    # A ragged must-keep set, as sinks plus a local area that differs by request.
    must = (torch.rand(rows, tokens, generator=generator) < 0.2) & valid
    must &= must.cumsum(-1) <= budget
    credit = torch.rand(rows, tokens, generator=generator) if has_credit else None
    if credit is not None:
        credit = credit.masked_fill(~valid, 0.0)
    got = choose(usage, score, must, lengths, budget, config, credit)
    for r in range(rows):
        n = int(lengths[r])
        keep, segments, quotas, updated = brute_ams.brute_choose(
            usage[r, :n].tolist(),
            score[r, :n].tolist(),
            set(must[r].nonzero().flatten().tolist()),
            budget,
            config.model_dump(),
            None if credit is None else credit[r, :n].tolist(),
        )
        assert got.keep[r].nonzero().flatten().tolist() == keep
        used = len(segments)
        assert got.segments[r, :used].tolist() == segments
        assert (got.segments[r, used:] == n).all()
        assert got.quotas[r, :used].tolist() == quotas
        assert (got.quotas[r, used:] == 0).all()
        expected = torch.tensor(updated, dtype=torch.float64).float()
        assert torch.equal(got.credit[r, :n], expected)
        assert (got.credit[r, n:] == 0).all()


@pytest.mark.parametrize("parity", [False, True])
def test_a_row_does_not_depend_on_its_batch(parity: bool) -> None:
    config = changed(DEFAULT, parity=parity)
    lengths = torch.tensor([200, 333, 256, 400, 201])
    usage = make_usage("random", 5, 400, 1)
    score = make_usage("ties", 5, 400, 2)
    credit = make_usage("random", 5, 180, 3)
    batch = select(usage, score, 160, config, credit, lengths)
    for r in range(5):
        n = int(lengths[r])
        for width in (n, n + 7, 400):
            width = min(width, 400)
            alone = select(
                usage[r : r + 1, :width],
                score[r : r + 1, :width],
                160,
                config,
                credit[r : r + 1],
                lengths[r : r + 1],
            )
            assert torch.equal(alone.keep, batch.keep[r : r + 1])
            if parity:
                torch.testing.assert_close(alone.credit, batch.credit[r : r + 1])
            else:
                assert torch.equal(alone.credit, batch.credit[r : r + 1])
            used = (alone.quotas > 0).sum()
            assert (batch.quotas[r] > 0).sum() == used


def test_must_keep_beyond_the_budget() -> None:
    usage = make_usage("random", 1, 50, 0)
    config = changed(DEFAULT, sinks=4, recent=32)
    paper = select(usage, usage, 16, config)
    assert paper.keep.tolist() == [[0, 1, 2, 3, *range(38, 50)]]
    config = changed(config, parity=True)
    code = select(usage, usage, 16, config)
    assert code.keep.tolist() == [list(range(34, 50))]


def test_credit_is_mixed_into_the_mass_and_gathered() -> None:
    config = changed(DEFAULT, ema_decay=0.5, ema_mix=0.5)
    usage = make_usage("random", 2, 100, 0)
    first = select(usage, usage, 60, config)
    mass = usage.double() / usage.double().sum(-1, keepdim=True)
    expected = (0.5 * mass).gather(-1, first.keep).float()
    torch.testing.assert_close(first.credit, expected, rtol=1e-6, atol=1e-9)
    longer = make_usage("random", 2, 90, 1)
    second = select(longer, longer, 60, config, first.credit)
    old = torch.nn.functional.pad(first.credit.double(), (0, 30))
    mass = longer.double() / longer.double().sum(-1, keepdim=True)
    expected = (0.5 * old + 0.5 * mass).gather(-1, second.keep).float()
    torch.testing.assert_close(second.credit, expected, rtol=1e-6, atol=1e-9)


def test_select_refuses() -> None:
    """For the options of the word see test_registry."""
    with pytest.raises(ValueError, match="recent: got True, expected "):
        changed(DEFAULT, recent=True)
    usage = torch.rand(2, 10)
    with pytest.raises(ValueError, match="budget: expected 1..10 tokens, got 11"):
        select(usage, usage, 11, DEFAULT)
    with pytest.raises(ValueError, match="budget"):
        select(usage, usage, 0, DEFAULT)
    with pytest.raises(ValueError, match="usage and score"):
        select(usage, usage[:, :9], 5, DEFAULT)
    with pytest.raises(ValueError, match="credit"):
        select(usage, usage, 5, DEFAULT, credit=torch.rand(2, 11))


def test_the_example_of_the_module() -> None:
    usage = torch.zeros(1, 64)
    usage[0, 40:50] = 1.0
    kept = select(usage, usage, 16, AMSConfig(sinks=2, recent=4, min_quota=0)).keep
    assert kept[0].tolist() == [0, 1, *range(40, 50), *range(60, 64)]


def test_presets() -> None:
    default, paper, code = (
        AMSConfig(**PRESETS[name]) for name in ("default", "paper", "code")
    )
    table = {"segment_mass": 0.1, "min_segment": 16, "max_segment": 256, "min_quota": 1}
    assert default == AMSConfig(**table, ema_decay=0.9, ema_mix=0.9)
    assert (default.sinks, default.recent) == (4, 32)
    assert (default.window, default.pool_kernel, default.suffix_pad) == (32, 5, "max")
    assert paper == default.model_copy(update={"window": 128})
    table = {"segment_mass": 0.02, "min_segment": 32, "max_segment": 1024}
    assert code == AMSConfig(**table, min_quota=8, ema_decay=0.8, ema_mix=0.7)
