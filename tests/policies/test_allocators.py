"""What every allocator must do, whatever the scores, and the rule of each."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.brute_ams import best, deal
from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    LENGTHS,
    ROWS,
    SHORTEST,
    TOKENS,
    choose,
    make_inputs,
    make_score,
    marked,
    one_event,
)
from support.sweeps import trials
from support.words import built
from vllm_kvpolicy.kernels.ranking import limit_must_keep
from vllm_kvpolicy.policies.allocators.adakv import AdaKVAllocator
from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.allocators.pyramid import PyramidAllocator
from vllm_kvpolicy.policies.allocators.strat import StratifiedAllocator
from vllm_kvpolicy.policies.base import EventInputs, Needs
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


# -- each rule, against loops over tokens ----------------------------------------------

BUDGET = 70


def case(kind: str) -> tuple[Tensor, EventInputs]:
    inputs = make_inputs(Needs())
    return make_score(kind, inputs.must_keep.shape), inputs


def row(
    score: Tensor, inputs: EventInputs, *at: int
) -> tuple[list[float], set[int], list[int]]:
    """Scores, must-keep tokens and other tokens of one (event, layer, head)."""
    must = marked(inputs.must_keep, at)
    others = [i for i in range(int(inputs.lengths[at])) if i not in must]
    return score[at].tolist(), must, others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
def test_adakv(kind: str, floor: float) -> None:
    score, inputs = case(kind)
    got = (
        built(AdaKVAllocator, adakv_floor=floor)
        .choose(score, inputs, None, BUDGET)
        .keep
    )
    for e in range(EVENTS):
        for layer in range(LAYERS):
            keep, open_tokens = [], []
            for head in range(HEADS):
                values, must, others = row(score, inputs, e, layer, head)
                own = min(int(floor * BUDGET), BUDGET - len(must))
                keep.append(must | set(best(others, values, own)))
                open_tokens += [
                    (-math.inf if math.isnan(values[i]) else values[i], i, head)
                    for i in others
                    if i not in keep[head]
                ]
            left = HEADS * BUDGET - sum(map(len, keep))
            for _, i, head in sorted(open_tokens, reverse=True)[:left]:
                keep[head].add(i)
            for head in range(HEADS):
                assert marked(got, (e, layer, head)) == keep[head]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 20, 500])
def test_chunk(kind: str, length: int) -> None:
    score, inputs = case(kind)
    got = (
        built(ChunkAllocator, chunk_length=length)
        .choose(score, inputs, None, BUDGET)
        .keep
    )
    for e in range(EVENTS):
        for layer in range(LAYERS):
            chunks: dict[int, list[float]] = {}
            for head in range(HEADS):
                values = score[e, layer, head].tolist()
                for i in range(LENGTHS[e][layer][head]):
                    value = -math.inf if math.isnan(values[i]) else values[i]
                    chunks.setdefault(i // length, []).append(value)
            means = [sum(part) / len(part) for _, part in sorted(chunks.items())]
            order = best(list(range(len(means))), means, len(means))
            for head in range(HEADS):
                values, must, others = row(score, inputs, e, layer, head)
                keep = set(must)
                for chunk in order:
                    members = [i for i in others if i // length == chunk]
                    keep.update(best(members, values, BUDGET - len(keep)))
                assert marked(got, (e, layer, head)) == keep


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 16, 50, 500])
def test_strat(kind: str, block: int) -> None:
    score, inputs = case(kind)
    got = (
        built(StratifiedAllocator, strat_block=block)
        .choose(score, inputs, None, BUDGET)
        .keep
    )
    for at in ROWS:
        values, must, others = row(score, inputs, *at)
        blocks = [
            [i for i in others if i // block == b] for b in range(max(others) + 1)
        ]
        quotas = deal([len(part) for part in blocks], BUDGET - len(must))
        keep = set(must)
        for part, quota in zip(blocks, quotas, strict=True):
            keep.update(best(part, values, quota))
        assert marked(got, at) == keep


@pytest.mark.parametrize("layers", [1, 2, 5, 28, 36])
@pytest.mark.parametrize("budget", [1, 17, 256, 2047, 2048])
@pytest.mark.parametrize("headroom", [0, 128, 512, 10**6])
@pytest.mark.parametrize("extra", [0, 1, 64, 10**7])
def test_pyramid_plan(layers: int, budget: int, headroom: int, extra: int) -> None:
    """No layer is asked for more than is held, however short the interval."""
    held = torch.tensor([budget + 10**7, budget + extra])
    allocator = built(PyramidAllocator, pyramid_headroom=headroom)
    plan = allocator.plan(layers, budget, held)[1].tolist()
    assert sum(plan) == layers * budget
    assert plan == sorted(plan, reverse=True)
    assert plan[0] <= budget + extra
    highest = min(2 * budget - budget / 20, budget + headroom, budget + extra)
    if layers > 1:
        assert abs(plan[0] - highest) < 1 and abs(plan[-1] + highest - 2 * budget) < 1
        step = (2 * highest - 2 * budget) / (layers - 1)
        for layer, tokens in enumerate(plan):
            assert abs(tokens - (highest - layer * step)) < 1


@pytest.mark.parametrize(
    ("lengths", "local", "want"),
    [
        ([100] * 4, 6, [100, 87, 73, 60]),
        ([120] * 4, 6, [120, 93, 67, 40]),
        ([150] * 4, 6, [120, 93, 67, 40]),
        # 6 tokens must stay beyond the last layer's plan: 2 less for each other layer.
        ([150] * 4, 42, [118, 91, 65, 46]),
        # The first layer holds 21 tokens less than planned: 7 more for each other one.
        ([99, 140, 140, 140], 6, [99, 100, 74, 47]),
    ],
)
def test_pyramid(lengths: list[int], local: int, want: list[int]) -> None:
    held = [[[length] * 3 for length in lengths]] * 2
    sizes = {"lengths": held, "local": [local] * 2, "width": max(lengths)}
    inputs = make_inputs(Needs(), **sizes)
    score = torch.rand(inputs.must_keep.shape)
    allocator = built(PyramidAllocator, pyramid_headroom=40)
    keep = allocator.choose(score, inputs, None, 80).keep
    assert (keep.sum(-1) == torch.tensor(want)[:, None]).all()
    for layer, tokens in enumerate(want):
        values, must, others = row(score, inputs, 0, layer, 2)
        chosen = must | set(best(others, values, tokens - len(must)))
        assert marked(keep, (0, layer, 2)) == chosen
