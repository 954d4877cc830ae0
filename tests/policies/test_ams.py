"""AMS as served: against loops over tokens, and properties that must always hold."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import brute_ams
from support.sweeps import trials
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, choose, select

DEFAULT = PRESETS["default"]
KINDS = ("random", "sinky", "zeros", "one_hot", "flat", "ties", "nan")


def of_table(
    mass: float,
    low: int,
    high: int,
    quota: int,
    decay: float,
    mix: float,
    **others: Any,
) -> AMSConfig:
    """A configuration in the order of the paper's Table 15."""
    names = "segment_mass", "min_segment", "max_segment", "min_quota"
    values = zip(names, (mass, low, high, quota), strict=True)
    return AMSConfig(**dict(values), ema_decay=decay, ema_mix=mix, **others)


def changed(config: AMSConfig, **values: Any) -> AMSConfig:
    return AMSConfig(**{**config.model_dump(), **values})


def make_usage(kind: str, rows: int, tokens: int, seed: int) -> torch.Tensor:
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


@settings(max_examples=trials(150), deadline=None, derandomize=True)
@given(
    config=configs(),
    tokens=st.integers(1, 300),
    share=st.floats(0, 1),
    usage_kind=st.sampled_from(KINDS),
    score_kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    parity=st.booleans(),
)
def test_select_keeps_exactly_the_budget(
    config: AMSConfig,
    tokens: int,
    share: float,
    usage_kind: str,
    score_kind: str,
    seed: int,
    parity: bool,
) -> None:
    # The authors' code has no rule for NaN usage.
    if parity and usage_kind == "nan":
        usage_kind = "random"
    config = changed(config, parity=parity)
    rows, budget = 3, max(1, round(share * tokens))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(budget, tokens + 1, (rows,), generator=generator)
    usage = make_usage(usage_kind, rows, tokens, seed)
    score = make_usage(score_kind, rows, tokens, seed + 1)
    got = select(usage, score, budget, config, lengths=lengths)
    assert got.keep.shape == (rows, budget) and got.keep.dtype == torch.int64
    assert (got.keep[:, 1:] > got.keep[:, :-1]).all()
    assert (got.keep >= 0).all() and (got.keep < lengths[:, None]).all()
    sinks = min(config.sinks, budget)
    recent = min(config.recent, budget - sinks)
    if parity:
        recent = min(config.recent, budget)
        sinks = min(config.sinks, budget - recent)
    position = torch.arange(tokens)
    must = (position < sinks) | (position >= lengths[:, None] - recent)
    must &= position < lengths[:, None]
    kept = torch.zeros(rows, tokens, dtype=torch.bool).scatter_(-1, got.keep, True)
    assert (kept | ~must).all()
    room = budget if parity else budget - must.sum(-1)
    assert (got.quotas.sum(-1) == room).all()
    size = got.segments[..., 1] - got.segments[..., 0]
    assert (size.sum(-1) == lengths).all()
    assert (got.segments[:, 1:, 0] == got.segments[:, :-1, 1]).all()
    # No segment but the last is short; a split piece is never longer than that.
    is_last = got.segments[..., 1] == lengths[:, None]
    if config.segments == "fixed":
        assert ((size == config.fixed_segment) | is_last).all()
    else:
        assert ((size >= config.min_segment) | is_last).all()
        assert (size < config.min_segment + config.max_segment).all()


@pytest.mark.parametrize("seed", range(20))
def test_every_segment_gets_its_floor(seed: int) -> None:
    config = changed(DEFAULT, min_quota=8)
    usage = make_usage(KINDS[seed % 4], 6, 400, seed)
    score = make_usage("random", 6, 400, seed + 100)
    got = select(usage, score, 250, config)
    for r in range(6):
        kept = set(got.keep[r].tolist())
        for start, end in got.segments[r].tolist():
            held = len(kept & set(range(start, end)))
            assert held >= min(config.min_quota, end - start)


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


def test_padding_may_hold_anything() -> None:
    lengths = torch.tensor([90, 120])
    usage, score = make_usage("random", 2, 120, 1), make_usage("random", 2, 120, 2)
    clean = select(usage, score, 60, DEFAULT, lengths=lengths)
    usage[0, 90:], score[0, 90:] = torch.nan, torch.inf
    dirty = select(usage, score, 60, DEFAULT, lengths=lengths)
    assert torch.equal(clean.keep, dirty.keep)
    assert torch.equal(clean.credit, dirty.credit)


@pytest.mark.parametrize("parity", [False, True])
def test_more_segments_than_budget(parity: bool) -> None:
    config = of_table(0.02, 1, 4, 3, 0.9, 0.9, sinks=0, recent=0, parity=parity)
    usage = make_usage("random", 3, 200, 5)
    got = select(usage, make_usage("random", 3, 200, 6), 10, config)
    used = (got.segments[..., 0] < 200).sum(-1)
    assert (used > 10).all()
    assert (got.quotas.sum(-1) == 10).all() and (got.quotas <= 1).all()
    size = got.segments[..., 1] - got.segments[..., 0]
    mass = torch.nn.functional.pad(usage.double().cumsum(-1), (1, 0))
    mass = mass.gather(-1, got.segments[..., 1]) - mass.gather(-1, got.segments[..., 0])
    for r in range(3):
        rich = mass[r][got.quotas[r] > 0].min()
        assert rich > mass[r][(got.quotas[r] == 0) & (size[r] > 0)].max()


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
def test_nothing_to_drop(tokens: int, parity: bool) -> None:
    config = changed(DEFAULT, parity=parity)
    usage = make_usage("random", 2, tokens, 0)
    got = select(usage, usage, tokens, config)
    assert torch.equal(got.keep, torch.arange(tokens).expand(2, -1))


def test_one_token_to_drop() -> None:
    score = make_usage("random", 3, 65, 4)
    lowest = [30, 4, 56]
    score[torch.arange(3), lowest] = -1.0
    score[:, [0, 3, 57, 64]] = -2.0  # must be kept all the same
    config = of_table(0.1, 4096, 4096, 0, 0.9, 0.9, sinks=4, recent=8)
    got = select(torch.ones(3, 65), score, 64, config)
    for r in range(3):
        assert set(range(65)) - set(got.keep[r].tolist()) == {lowest[r]}


@pytest.mark.parametrize("parity", [False, True])
def test_of_equal_scores_the_later_position_wins(parity: bool) -> None:
    config = of_table(0.95, 1, 4096, 0, 0.9, 0.9, sinks=0, recent=0, parity=parity)
    usage = torch.zeros(1, 50)
    usage[0, 49] = 1.0  # one cut, at the last token
    got = select(usage, torch.zeros(1, 50), 20, config)
    assert got.keep.tolist() == [list(range(30, 50))]


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


def test_without_the_average_credit_changes_nothing() -> None:
    config = changed(DEFAULT, ema_mix=1.0)
    usage, score = make_usage("random", 3, 200, 0), make_usage("random", 3, 200, 1)
    credit = make_usage("sinky", 3, 200, 2)
    alone = select(usage, score, 120, config)
    assert torch.equal(select(usage, score, 120, config, credit).keep, alone.keep)
    mixed = select(usage, score, 120, changed(config, ema_mix=0.5), credit)
    assert not torch.equal(mixed.keep, alone.keep)


def test_uniform_quotas_differ_by_one_at_most_but_for_full_segments() -> None:
    config = changed(DEFAULT, quotas="uniform", sinks=0, recent=0)
    usage, score = make_usage("sinky", 3, 400, 0), make_usage("random", 3, 400, 1)
    got = select(usage, score, 250, config)
    size = got.segments[..., 1] - got.segments[..., 0]
    for r in range(3):
        is_full = got.quotas[r] == size[r]
        open_quotas = got.quotas[r][~is_full]
        assert open_quotas.max() - open_quotas.min() <= 1
        assert (got.quotas[r][is_full] <= open_quotas.max()).all()
    # The mass still cuts, and by mass the shares are others.
    by_mass = select(usage, score, 250, changed(config, quotas="mass"))
    assert torch.equal(by_mass.segments, got.segments)
    assert not torch.equal(by_mass.quotas, got.quotas)


def test_fixed_segments() -> None:
    config = changed(DEFAULT, segments="fixed")
    lengths = torch.tensor([300, 256])
    usage, score = make_usage("random", 2, 300, 0), make_usage("random", 2, 300, 1)
    got = select(usage, score, 100, config, lengths=lengths)
    assert got.segments[0].tolist() == [[0, 128], [128, 256], [256, 300]]
    assert got.segments[1].tolist() == [[0, 128], [128, 256], [256, 256]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment_mass", 0.0),
        ("segment_mass", 1.0),
        ("segment_mass", float("nan")),
        ("min_segment", 0),
        ("min_segment", 1.5),
        ("max_segment", 15),
        ("min_quota", -1),
        ("sinks", -1),
        ("recent", True),
        ("ema_decay", 1.0),
        ("ema_mix", 1.01),
        ("quotas", "equal"),
        ("segments", None),
        ("fixed_segment", 0),
        ("parity", 1),
    ],
)
def test_config_refuses(field: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=f"{field}: got {value!r}, expected ".replace("(", r"\(")
    ):
        changed(DEFAULT, **{field: value})


def test_select_refuses() -> None:
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
    default, paper, code = (PRESETS[name] for name in ("default", "paper", "code"))
    assert default == of_table(0.1, 16, 256, 1, 0.9, 0.9)
    assert (default.sinks, default.recent) == (4, 32)
    assert (default.window, default.pool_kernel, default.suffix_pad) == (32, 5, "max")
    assert paper == default.model_copy(update={"window": 128})
    assert code == of_table(0.02, 32, 1024, 8, 0.8, 0.7)
