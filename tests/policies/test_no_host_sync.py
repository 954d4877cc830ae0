"""Nothing on the way of an event may wait for the device or depend on its data.

Fake tensors have shapes but no data: whatever reads a value on the host, or lets values
decide a shape, raises.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from vllm_kvpolicy.kernels.ranking import ascending_indices, fill_next_best
from vllm_kvpolicy.policies import factory, registry
from vllm_kvpolicy.policies.ams import PRESETS, select
from vllm_kvpolicy.policies.base import EventInputs

EVENTS, LAYERS, HEADS, GROUP, SIZE, TOKENS, BUDGET = 2, 2, 2, 2, 8, 80, 50


def fake_inputs() -> EventInputs:
    return EventInputs(
        lengths=torch.full((EVENTS,), TOKENS),
        must_keep=torch.zeros(EVENTS, TOKENS, dtype=torch.bool),
        keys=torch.zeros(EVENTS, LAYERS, HEADS, TOKENS, SIZE),
        queries=torch.zeros(EVENTS, LAYERS, HEADS * GROUP, 32, SIZE),
        credit=torch.zeros(EVENTS, LAYERS, HEADS, TOKENS),
        scale=1.0,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
    )


def test_fake_tensors_notice() -> None:
    with FakeTensorMode():
        mask = torch.zeros(4, dtype=torch.bool)
        with pytest.raises(DataDependentOutputException):
            mask.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            mask.nonzero()


@pytest.mark.parametrize("name", registry.names())
def test_decide_and_arrange(name: str) -> None:
    policy = factory.build(name)
    with FakeTensorMode():
        inputs = fake_inputs()
        got = policy.decide(inputs, BUDGET)
        assert got.keep.shape == (EVENTS, LAYERS, HEADS, TOKENS)
        rows, score = got.keep.flatten(0, 2), got.score.flatten(0, 2)
        fuller = fill_next_best(rows, score, torch.ones_like(rows), BUDGET + 3)
        sources = ascending_indices(fuller, BUDGET + 3)
        sources = sources.view(EVENTS, LAYERS, HEADS, -1)
        placed = policy.arrange(sources, torch.zeros(EVENTS, dtype=torch.int64))
        assert placed.shape == (EVENTS, LAYERS, HEADS, BUDGET + 3)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_select(preset: str) -> None:
    with FakeTensorMode():
        usage = torch.zeros(6, TOKENS)
        config = PRESETS[preset].config
        got = select(usage, usage, BUDGET, config, torch.zeros(6, BUDGET))
        assert got.keep.shape == (6, BUDGET)
