"""Nothing on the way of an event may wait for the device or depend on its data.

Fake tensors have shapes but no data: whatever reads a value on the host, lets values
decide a shape, or makes a tensor on another device raises.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)

from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    SHORTEST,
    TOKENS,
    make_inputs,
    on_device,
)
from support.scorer_cases import VARIANTS, case_id
from support.sweeps import covering
from vllm_kvpolicy.kernels.ranking import fill_next_best
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, select
from vllm_kvpolicy.policies.base import Policy
from vllm_kvpolicy.policies.testing import MovementPolicy

BUDGET = SHORTEST
# Options of allocators, with any scorer.
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("hard-tova", {"hard_order": "attention", "hard_scope": "layer"}),
    ("hard-tova", {"hard_mode": "dynamic"}),
    ("hard-tova", {"hard_merge": True}),
    ("ams-tova", {"segments": "fixed"}),
    ("ams-tova", {"quotas": "uniform"}),
)
DEVICE = "meta"  # no CPU: tensors that policies make must be on it, too


def test_fake_tensors_notice() -> None:
    with FakeTensorMode():
        mask = torch.zeros(4, dtype=torch.bool)
        with pytest.raises(DataDependentOutputException):
            mask.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            mask.nonzero()
        elsewhere = torch.zeros(4, device=DEVICE)
        with pytest.raises(FakeTensorDeviceMismatchError):
            torch.where(mask, 1.0, elsewhere)
        with pytest.raises(RuntimeError):
            elsewhere.sum().item()


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in covering(registry.names())), *VARIANTS, *OPTIONS],
    ids=case_id,
)
def test_decide_and_shuffle(
    name: str, options: dict[str, Any], build: Callable[..., Policy]
) -> None:
    policy = build(name, options)
    # Calibrations are real tensors, which move to the device.
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = on_device(make_inputs(policy.needs), DEVICE)
        got = policy.decide(inputs, BUDGET)
        assert got.keep.shape == got.score.shape == (EVENTS, LAYERS, HEADS, TOKENS)
        assert set(got.memory) == set(policy.needs.memory)
        fuller = fill_next_best(got.keep, got.score, inputs.valid, BUDGET + 3)
        assert fuller.shape == got.keep.shape
        entries = torch.zeros(EVENTS, 40, dtype=torch.int64, device=DEVICE)
        seeds = torch.zeros(EVENTS, dtype=torch.int64, device=DEVICE)
        if isinstance(policy, MovementPolicy):
            assert policy.shuffle(entries, entries, seeds).shape == entries.shape
            assert policy.shuffle_pages(entries, seeds).shape == entries.shape


@pytest.mark.parametrize("preset", list(PRESETS))
def test_select(preset: str) -> None:
    with FakeTensorMode():
        usage = torch.zeros(6, TOKENS)
        config = AMSConfig(**PRESETS[preset])
        got = select(usage, usage, BUDGET, config, torch.zeros(6, BUDGET))
        assert got.keep.shape == (6, BUDGET)
