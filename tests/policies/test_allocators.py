"""What every allocator must do, whatever the scores."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    LENGTHS,
    SHORTEST,
    TOKENS,
    choose,
    make_inputs,
    make_score,
    one_event,
)
from support.sweeps import trials
from support.words import built
from vllm_kvpolicy.kernels.ranking import limit_must_keep
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.names import ALLOCATORS
from vllm_kvpolicy.policies.words import BaseAllocator

NAMES = list(ALLOCATORS)
EQUAL = [name for name in NAMES if not ALLOCATORS[name].ragged]
KINDS = ("random", "ties", "flat", "special")


@pytest.fixture(params=NAMES)
def allocator(request: pytest.FixtureRequest) -> BaseAllocator:
    return built(ALLOCATORS[request.param])


@pytest.fixture
def inputs(allocator: BaseAllocator) -> EventInputs:
    return make_inputs(allocator.needs)


these = partial(pytest.mark.parametrize, "allocator", indirect=True)


@settings(max_examples=trials(100), deadline=None, derandomize=True)
@given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", NAMES)
def test_keeps_its_total_and_the_must_keep_set(
    name: str, data: st.DataObject, kind: str, seed: int
) -> None:
    allocator = built(ALLOCATORS[name])
    held = st.lists(st.integers(20, 64), min_size=2, max_size=2)
    lengths = [[data.draw(held) for _ in range(LAYERS)] for _ in range(2)]
    shortest = min(min(layer) for part in lengths for layer in part)
    budget = data.draw(st.integers(1, shortest))
    local = data.draw(st.lists(st.integers(0, 30), min_size=2, max_size=2))
    inputs = make_inputs(allocator.needs, lengths=lengths, local=local, width=64)
    score = make_score(kind, inputs.must_keep.shape, seed)
    got = choose(allocator, score, inputs, budget)
    assert got.keep.shape == got.score.shape == inputs.must_keep.shape
    assert got.keep.dtype == torch.bool and got.score.dtype == torch.float32
    assert (got.keep | ~limit_must_keep(inputs.must_keep, budget)).all()
    assert not (got.keep & ~inputs.valid).any()
    count = got.keep.sum(-1)
    total = count.sum((1, 2))
    assert (total <= budget * LAYERS * HEADS).all()
    if not getattr(allocator, "dynamic", False):
        assert (total == budget * LAYERS * HEADS).all()
    if name in EQUAL:
        assert (count == budget).all()
    if name == "adakv":
        assert (count.sum(-1) == budget * HEADS).all()


def test_without_a_bound_all_is_kept(
    allocator: BaseAllocator, inputs: EventInputs
) -> None:
    score = make_score("special", inputs.must_keep.shape)
    assert torch.equal(choose(allocator, score, inputs, TOKENS).keep, inputs.valid)


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize("e", range(EVENTS))
def test_an_event_does_not_depend_on_neighbours_or_padding(
    allocator: BaseAllocator, inputs: EventInputs, e: int, kind: str
) -> None:
    score = make_score(kind, inputs.must_keep.shape)
    score = score.masked_fill(~inputs.valid, torch.nan)
    batch = choose(allocator, score, inputs, 70)
    longest = max(max(layer) for layer in LENGTHS[e])
    for width in (longest, TOKENS):
        alone = one_event(inputs, e, width)
        got = choose(allocator, score[e : e + 1, ..., :width], alone, 70)
        assert torch.equal(got.keep[0], batch.keep[e, ..., :width])
    high = score.masked_fill(~inputs.valid, torch.inf)
    assert torch.equal(choose(allocator, high, inputs, 70).keep, batch.keep)


def test_nan_is_minus_infinity(allocator: BaseAllocator, inputs: EventInputs) -> None:
    score = make_score("special", inputs.must_keep.shape)
    clean = score.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    got = choose(allocator, score, inputs, 70).keep
    assert torch.equal(got, choose(allocator, clean, inputs, 70).keep)


@these(["", "adakv", "pyramid", "chunk", "hard"])
def test_of_equal_scores_the_later_position_wins(
    allocator: BaseAllocator, inputs: EventInputs
) -> None:
    score = make_score("flat", inputs.must_keep.shape)
    keep = choose(allocator, score, inputs, 70).keep
    dropped = inputs.valid & ~keep
    newest_dropped = torch.where(dropped, torch.arange(TOKENS), -1).amax(-1)
    is_newer = torch.arange(TOKENS) > newest_dropped[..., None]
    assert torch.equal(keep, inputs.valid & (is_newer | inputs.must_keep))


@pytest.mark.parametrize("kind", ["random", "ties"])
@these(["", "adakv", "chunk", "strat"])
def test_a_larger_budget_drops_nothing_more(
    allocator: BaseAllocator, inputs: EventInputs, kind: str
) -> None:
    score = make_score(kind, inputs.must_keep.shape)
    kept = [
        choose(allocator, score, inputs, budget).keep for budget in range(51, SHORTEST)
    ]
    for fewer, more in zip(kept, kept[1:], strict=False):
        assert (more | ~fewer).all()


def test_inputs_stay_as_they_are(allocator: BaseAllocator, inputs: EventInputs) -> None:
    score = make_score("ties", inputs.must_keep.shape)
    before = (score.clone(), inputs.must_keep.clone(), inputs.lengths.clone())
    choose(allocator, score, inputs, 70)
    after = (score, inputs.must_keep, inputs.lengths)
    assert all(map(torch.equal, before, after))
