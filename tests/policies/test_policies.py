"""Every policy of the registry through the contract that the worker calls."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support import brute_ams
from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    ROWS,
    SHORTEST,
    TOKENS,
    make_inputs,
)
from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.kernels.window_usage import (
    mean_over_group,
    pooled_usage,
    window_usage,
)
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.allocators.ams import CREDIT, PRESETS, AMSOptions
from vllm_kvpolicy.policies.base import Needs, Policy
from vllm_kvpolicy.policies.testing import exchanged, shuffled

Build = Callable[..., Policy]
EVICTIONS = [name for name in registry.names() if not registry.parse(name).is_test]
TESTS = [name for name in registry.names() if registry.parse(name).is_test]
BUDGET = SHORTEST


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("budget", [60, BUDGET])
def test_keeps_the_budget_and_the_must_keep_set(
    name: str, budget: int, build: Build
) -> None:
    policy, info = build(name), registry.parse(name)
    inputs = make_inputs(policy.needs)
    got = policy.decide(inputs, budget)
    shape = (EVENTS, LAYERS, HEADS, TOKENS)
    assert got.keep.shape == got.score.shape == shape
    assert got.keep.dtype == torch.bool and got.score.dtype == torch.float32
    count = got.keep.sum(-1)
    total = count.sum((1, 2))
    assert (total <= budget * LAYERS * HEADS).all()
    assert policy.dynamic or (total == budget * LAYERS * HEADS).all()
    assert info.is_ragged({}) or (count == budget).all()
    assert (got.keep | ~inputs.must_keep).all()
    assert not (got.keep & ~inputs.valid).any()
    assert set(got.memory) == set(policy.needs.memory)
    for value in got.memory.values():
        assert value.shape == shape and value.dtype == torch.float32


@pytest.mark.parametrize("name", EVICTIONS)
def test_hints_come_before_scores(name: str, build: Build) -> None:
    """What must stay lies anywhere, and what goes first only fills up pages."""
    policy, generator = build(name), torch.Generator().manual_seed(1)
    inputs = make_inputs(policy.needs)
    marks = torch.rand(inputs.must_keep.shape, generator=generator)
    must_keep = (inputs.must_keep | (marks > 0.95)) & inputs.valid
    candidates = (must_keep | (marks > 0.3)) & inputs.valid
    got = policy.decide(
        replace(inputs, must_keep=must_keep, candidates=candidates), BUDGET
    )
    assert (got.keep | ~must_keep).all() and not (got.keep & ~inputs.valid).any()
    assert policy.decide(inputs, BUDGET).keep[~candidates].any()
    if registry.parse(name).scorer is not None:
        assert not (got.keep & ~candidates).any()
        assert (got.score[~candidates & inputs.valid] == -torch.inf).all()


@pytest.mark.parametrize("name", ["tova", "snapkv", "keydiff", "h2o"])
def test_uniform_is_top_k_by_score(name: str) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.needs)
    got = policy.decide(inputs, BUDGET)
    for row in ROWS:
        length = int(inputs.lengths[row])
        forced = inputs.must_keep[row].nonzero().flatten().tolist()
        others = [i for i in range(length) if i not in forced]
        best = brute_ams.best(others, got.score[row].tolist(), BUDGET - len(forced))
        assert got.keep[row].nonzero().flatten().tolist() == sorted(forced + best)


@pytest.mark.parametrize("name", ["ams-tova", "ams-snapkv"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_ams_policy_equals_loops(name: str, preset: str) -> None:
    options = {"preset": preset, "window": 16, "pool_kernel": 3, "suffix_pad": "mean"}
    policy = factory.build(name, options)
    assert policy.needs.window_tokens == 16
    # More queries than asked for: the newest count.
    inputs = make_inputs(policy.needs, window=20)
    got = policy.decide(inputs, BUDGET)
    usage = window_usage(
        inputs.queries[..., -16:, :], inputs.paged("keys"), inputs.lengths, inputs.scale
    )
    mass = pooled_usage(
        mean_over_group(usage.mean, HEADS), usage.lengths, usage.window, 3, "mean"
    )
    for row in ROWS:
        held = (*row, slice(0, int(inputs.lengths[row])))
        keep, _, _, credit = brute_ams.brute_choose(
            mass[held].tolist(),
            got.score[held].tolist(),
            set(inputs.must_keep[row].nonzero().flatten().tolist()),
            BUDGET,
            AMSOptions(**PRESETS[preset]).model_dump(),
            inputs.memory[CREDIT][held].tolist(),
        )
        assert got.keep[row].nonzero().flatten().tolist() == keep
        want = torch.tensor(credit, dtype=torch.float64).float()
        assert torch.equal(got.memory[CREDIT][held], want)


def test_parts_remember_apart() -> None:
    policy = factory.build("ams-h2o")
    assert policy.needs.memory == ("h2o", CREDIT)
    inputs = make_inputs(policy.needs)
    got = policy.decide(inputs, BUDGET)
    assert torch.equal(got.memory["h2o"], got.score)
    assert not torch.equal(got.memory[CREDIT], got.score)


@pytest.mark.parametrize("name", ["ams-expected", "ams-rkv"])
def test_a_scorer_does_not_change_what_the_mass_is_measured_with(name: str) -> None:
    policy = factory.build(name)
    inputs = make_inputs(policy.needs, window=128)
    changed = inputs.queries.clone()
    changed[..., :-32, :] = 0
    got = policy.decide(inputs, BUDGET).memory[CREDIT]
    want = policy.decide(replace(inputs, queries=changed), BUDGET).memory[CREDIT]
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", TESTS)
def test_movement_keeps_everything(name: str) -> None:
    inputs = make_inputs(Needs())
    got = factory.build(name).decide(inputs, BUDGET)
    assert torch.equal(got.keep, inputs.valid)


def survivors(num_events: int) -> tuple[Tensor, Tensor]:
    """Sources and heads [E, 12 * 100], head by head."""
    sources = torch.arange(100).repeat(num_events, 12)
    heads = torch.arange(12).repeat_interleave(100).expand(num_events, -1)
    return sources, heads


@pytest.mark.parametrize("name", TESTS)
def test_movement_shuffles_within_each_head_and_event(name: str) -> None:
    policy, seeds = factory.build(name), torch.tensor([11, -(2**40)])
    sources, heads = survivors(2)
    got = policy.shuffle(sources, heads, seeds)
    by_head = got.view(2, 12, 100)
    assert torch.equal(by_head.sort(-1).values, sources.view(2, 12, 100))
    assert len({tuple(row) for row in by_head.flatten(0, 1).tolist()}) == 24
    assert (got == sources).float().mean() < 0.05
    assert torch.equal(policy.shuffle(sources, heads, seeds), got)
    assert torch.equal(policy.shuffle(sources[1:], heads[1:], seeds[1:]), got[1:])
    other = policy.shuffle(sources, heads, seeds + 1)
    assert (other == got).float().mean() < 0.05


@pytest.mark.parametrize("name", TESTS)
def test_ragged_movement_shuffles_pages(name: str) -> None:
    pages, seeds = torch.arange(200).expand(2, 200), torch.tensor([5, 6])
    assert factory.build(name).shuffle_pages(pages, seeds) is pages
    policy = factory.build(name, {"ragged": True})
    got = policy.shuffle_pages(pages, seeds)
    assert torch.equal(got.sort(-1).values, pages)
    assert not torch.equal(got[0], got[1])
    assert (got == pages).float().mean() < 0.05
    assert torch.equal(policy.shuffle_pages(pages[1:], seeds[1:]), got[1:])


def test_policies_refuse_what_they_cannot_do() -> None:
    policy = factory.build("ams-tova")
    inputs = make_inputs(Needs())
    with pytest.raises(ValueError, match="queries: got None, but this policy needs it"):
        policy.decide(inputs, BUDGET)
    with pytest.raises(ValueError, match="budget: expected 1..160 tokens, got 161"):
        policy.decide(inputs, TOKENS + 1)


# -- where survivors of test policies go, on plain integers ----------------------------

OWNED = list(range(100, 120))


class Pool:
    """Hands out fresh numbers until it is empty and remembers what was asked."""

    def __init__(self, num_free: int) -> None:
        self.free = list(range(num_free))
        self.asked: list[int] = []

    def take(self, count: int) -> list[int]:
        self.asked.append(count)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def test_shuffled_keeps_own_blocks_out_of_order_and_takes_nothing():
    pool = Pool(5)
    blocks = shuffled(OWNED, 12, pool.take, seed=1)
    assert set(blocks) <= set(OWNED) and len(set(blocks)) == 12
    assert blocks != sorted(blocks)
    assert pool.asked == []


def test_exchanged_trades_half_for_free_blocks():
    pool = Pool(50)
    blocks = exchanged(OWNED, 12, pool.take, seed=1)
    fresh = [block for block in blocks if block < 100]
    assert len(set(blocks)) == 12 and len(fresh) == 6
    assert pool.asked == [6]
    assert blocks != sorted(blocks)


@pytest.mark.parametrize("place", [shuffled, exchanged])
def test_every_placement_returns_the_count_of_distinct_blocks(place):
    rng = random.Random(2)
    for _ in range(500):
        owned = rng.sample(range(1000, 9000), rng.randint(1, 40))
        count = rng.randint(0, len(owned))
        pool = Pool(rng.randint(0, 30))
        before = set(pool.free)
        blocks = place(owned, count, pool.take, seed=rng.randrange(2**40))
        assert len(blocks) == len(set(blocks)) == count
        taken = before - set(pool.free)
        assert taken <= set(blocks) <= set(owned) | taken, "a taken block is lost"


def test_seeds_differ_between_events_and_repeat():
    seeds = {event_seed(ordinal, p) for ordinal in range(50) for p in range(0, 5000, 7)}
    assert len(seeds) == 50 * len(range(0, 5000, 7))
    assert event_seed(3, 4096) == event_seed(3, 4096)
    assert 0 <= event_seed(2**20, 2**31) < 2**63
