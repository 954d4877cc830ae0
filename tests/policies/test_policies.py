"""Every policy of the registry through the contract that the worker calls."""

import brute_ams
import pytest
import torch

from vllm_kvpolicy.kernels.window_usage import (
    mean_over_group,
    pooled_usage,
    window_usage_ref,
)
from vllm_kvpolicy.policies import factory, registry
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.params import AMS_PRESETS

EVENTS, LAYERS, HEADS, GROUP, SIZE, TOKENS, BUDGET = 3, 2, 2, 2, 8, 160, 90
LENGTHS = (160, 131, 90)
EVICTIONS = [name for name in registry.names() if not registry.parse(name).is_test]
TESTS = [name for name in registry.names() if registry.parse(name).is_test]


def make_inputs(window: int, has_credit: bool, seed: int = 0) -> EventInputs:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    position = torch.arange(TOKENS)
    # As at run time: 4 sinks, and a local area that differs by request.
    frontier = lengths - torch.tensor([32, 47, 39])
    must = (position < 4) | (position >= frontier[:, None])
    must &= position < lengths[:, None]
    keys = torch.randn(EVENTS, LAYERS, HEADS, TOKENS, SIZE, generator=generator)
    queries = torch.randn(
        EVENTS, LAYERS, HEADS * GROUP, max(window, 1), SIZE, generator=generator
    )
    credit = torch.rand(EVENTS, LAYERS, HEADS, TOKENS, generator=generator)
    return EventInputs(
        lengths=lengths,
        must_keep=must,
        keys=keys if window else None,
        queries=queries if window else None,
        credit=credit if has_credit else None,
        scale=SIZE**-0.5,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
    )


def one_event(inputs: EventInputs, e: int, width: int) -> EventInputs:
    """Event `e` alone, padded to `width` tokens instead of TOKENS."""
    pick = slice(e, e + 1)
    return EventInputs(
        lengths=inputs.lengths[pick],
        must_keep=inputs.must_keep[pick, :width],
        keys=None if inputs.keys is None else inputs.keys[pick, ..., :width, :],
        queries=None if inputs.queries is None else inputs.queries[pick],
        credit=None if inputs.credit is None else inputs.credit[pick, ..., :width],
        scale=inputs.scale,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
    )


@pytest.mark.parametrize("name", EVICTIONS)
def test_keeps_the_budget_and_the_must_keep_set(name: str) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.window_tokens, policy.has_credit)
    got = policy.decide(inputs, BUDGET)
    shape = (EVENTS, LAYERS, HEADS, TOKENS)
    assert got.keep.shape == got.score.shape == shape
    assert got.keep.dtype == torch.bool and got.score.dtype == torch.float32
    assert (got.keep.sum(-1) == BUDGET).all()
    must = inputs.must_keep[:, None, None]
    assert (got.keep | ~must).all()
    padding = torch.arange(TOKENS) >= inputs.lengths[:, None, None, None]
    assert not (got.keep & padding).any()
    assert (got.credit is not None) == policy.has_credit
    if got.credit is not None:
        assert got.credit.shape == shape and got.credit.dtype == torch.float32


@pytest.mark.parametrize("name", EVICTIONS)
def test_declares_what_the_registry_says(name: str) -> None:
    policy, info = factory.build(name), registry.parse(name)
    assert policy.window_tokens == info.window_tokens({})
    assert policy.has_credit == info.has_credit
    assert policy.needs_keys == (policy.window_tokens > 0)
    assert info.summary and info.source


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("e", range(EVENTS))
def test_an_event_does_not_depend_on_its_batch(name: str, e: int) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.window_tokens, policy.has_credit)
    batch = policy.decide(inputs, BUDGET)
    for width in (LENGTHS[e], min(LENGTHS[e] + 5, TOKENS), TOKENS):
        alone = policy.decide(one_event(inputs, e, width), BUDGET)
        assert torch.equal(alone.keep[0], batch.keep[e, ..., :width])


@pytest.mark.parametrize("name", EVICTIONS)
def test_must_keep_beyond_the_budget(name: str) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.window_tokens, policy.has_credit)
    keep = policy.decide(inputs, 20).keep
    for e, length in enumerate(LENGTHS):
        rows = keep[e].flatten(0, 1)
        assert (rows.sum(-1) == 20).all()
        assert rows[:, :4].all() and rows[:, length - 16 : length].all()


def test_streaming_keeps_sinks_and_newest() -> None:
    got = factory.build("streaming").decide(make_inputs(0, False), BUDGET)
    for e, length in enumerate(LENGTHS):
        want = [*range(4), *range(length - BUDGET + 4, length)]
        for row in got.keep[e].flatten(0, 1):
            assert row.nonzero().flatten().tolist() == want


@pytest.mark.parametrize("name", ["tova", "snapkv"])
def test_uniform_is_top_k_by_score(name: str) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.window_tokens, False)
    got = policy.decide(inputs, BUDGET)
    for e, length in enumerate(LENGTHS):
        forced = inputs.must_keep[e].nonzero().flatten().tolist()
        others = [i for i in range(length) if i not in forced]
        for layer in range(LAYERS):
            for head in range(HEADS):
                score = got.score[e, layer, head].tolist()
                best = brute_ams.best(others, score, BUDGET - len(forced))
                kept = got.keep[e, layer, head].nonzero().flatten().tolist()
                assert kept == sorted(forced + best)


@pytest.mark.parametrize("name", ["ams-tova", "ams-snapkv"])
@pytest.mark.parametrize("preset", list(AMS_PRESETS))
def test_ams_policy_equals_loops(name: str, preset: str) -> None:
    options = {"preset": preset, "window": 16, "pool_kernel": 3, "suffix_pad": "mean"}
    policy = factory.build(name, options)
    assert policy.window_tokens == 16
    inputs = make_inputs(20, True)  # more queries than asked for: the newest count
    got = policy.decide(inputs, BUDGET)
    usage = window_usage_ref(
        inputs.queries[..., -16:, :], inputs.keys, inputs.lengths, inputs.scale
    )
    mass = pooled_usage(
        mean_over_group(usage.mean, HEADS), usage.lengths, usage.window, 3, "mean"
    )
    for e, n in enumerate(LENGTHS):
        must = set(inputs.must_keep[e].nonzero().flatten().tolist())
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = (e, layer, head, slice(0, n))
                keep, _, _, credit = brute_ams.brute_choose(
                    mass[row].tolist(),
                    got.score[row].tolist(),
                    must,
                    BUDGET,
                    AMS_PRESETS[preset],
                    inputs.credit[row].tolist(),
                )
                assert got.keep[row].nonzero().flatten().tolist() == keep
                want = torch.tensor(credit, dtype=torch.float64).float()
                assert torch.equal(got.credit[row], want)


def test_ams_and_uniform_differ() -> None:
    inputs = make_inputs(32, True)
    plain = factory.build("tova").decide(inputs, BUDGET)
    ams = factory.build("ams-tova").decide(inputs, BUDGET)
    # A window of one and of 32 queries may sum their products in another order.
    torch.testing.assert_close(plain.score, ams.score)
    assert not torch.equal(plain.keep, ams.keep)


@pytest.mark.parametrize("name", EVICTIONS)
def test_normal_policies_keep_time_order(name: str) -> None:
    sources = torch.arange(24).view(1, 2, 2, 6)
    assert factory.build(name).arrange(sources, torch.tensor([7])) is sources


@pytest.mark.parametrize("name", TESTS)
def test_movement_keeps_everything(name: str) -> None:
    got = factory.build(name).decide(make_inputs(0, False), BUDGET)
    valid = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    assert torch.equal(got.keep, valid[:, None, None].expand_as(got.keep))


@pytest.mark.parametrize("name", TESTS)
def test_movement_shuffles_each_layer_head_and_event(name: str) -> None:
    policy = factory.build(name)
    sources = torch.arange(100).expand(2, 3, 4, 100)
    seeds = torch.tensor([11, -(2**40)])
    got = policy.arrange(sources, seeds)
    assert torch.equal(got.sort(-1).values, sources)
    rows = {tuple(row) for row in got.flatten(0, 2).tolist()}
    assert len(rows) == 24
    assert (got == sources).float().mean() < 0.05
    assert torch.equal(policy.arrange(sources, seeds), got)
    alone = policy.arrange(sources[1:], seeds[1:])
    assert torch.equal(alone, got[1:])
    other = policy.arrange(sources, seeds + 1)
    assert (other == got).float().mean() < 0.05


@pytest.mark.parametrize("name", TESTS)
def test_movement_leaves_padding_on_the_right(name: str) -> None:
    policy = factory.build(name)
    sources = torch.arange(50).expand(1, 2, 2, 50)
    want = policy.arrange(sources, torch.tensor([3]))
    padded = torch.nn.functional.pad(sources, (0, 14), value=-1)
    got = policy.arrange(padded, torch.tensor([3]))
    assert torch.equal(got[..., :50], want) and (got[..., 50:] == -1).all()


def test_policies_refuse_what_they_cannot_do() -> None:
    policy = factory.build("ams-tova")
    inputs = make_inputs(0, False)
    with pytest.raises(ValueError, match="window of 32 queries"):
        policy.decide(inputs, BUDGET)
    with pytest.raises(ValueError, match="budget: expected 1..160 tokens, got 161"):
        policy.decide(inputs, TOKENS + 1)
