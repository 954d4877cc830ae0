"""Each allocator's own rule, against loops over tokens."""

import math

import pytest
import torch
from torch import Tensor

from support.brute_ams import best, deal
from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    LENGTHS,
    ROWS,
    make_inputs,
    make_score,
    marked,
)
from support.words import built
from vllm_kvpolicy.policies.allocators.adakv import AdaKVAllocator
from vllm_kvpolicy.policies.allocators.chunk import ChunkAllocator
from vllm_kvpolicy.policies.allocators.pyramid import PyramidAllocator
from vllm_kvpolicy.policies.allocators.strat import StratifiedAllocator
from vllm_kvpolicy.policies.base import EventInputs, Needs

BUDGET = 70
KINDS = ("random", "ties", "special")


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
