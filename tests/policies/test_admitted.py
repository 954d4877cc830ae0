"""Admission in front of every eviction, and alone, through the worker's contract."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.event_inputs import EVENTS, HEADS, LAYERS, SHORTEST, make_inputs
from vllm_kvpolicy.policies import names as registry
from vllm_kvpolicy.policies.base import EventInputs, Needs, Policy
from vllm_kvpolicy.policies.compose import MEMORY, AdmittedPolicy, assemble
from vllm_kvpolicy.policies.model_files import ModelShape
from vllm_kvpolicy.policies.words import BaseAdmission

Build = Callable[..., Policy]
EVICTIONS = [
    name
    for name in registry.names()
    if name.rpartition("-")[0] in ("", "ams") and not registry.parse(name).is_test
]
BUDGET = SHORTEST


class Fixed:
    """Gates that grow with the place of a token in its row, from 0 to 1."""

    needs = Needs()

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.asked: list[Tensor] = []

    def check_model(self, model: ModelShape) -> None:
        if model.num_layers == 7:
            raise ValueError("seven")

    def gates(self, inputs: EventInputs, token: Tensor) -> Tensor:
        self.asked.append(token)
        return token / inputs.must_keep.shape[-1]


def remembered(inputs: EventInputs, gates: Tensor) -> EventInputs:
    """All gates of earlier tokens are known."""
    return replace(inputs, memory={**inputs.memory, MEMORY: gates})


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("threshold", [0.3, 0.8])
def test_eviction_chooses_among_what_is_admitted(
    name: str, threshold: float, build: Build
) -> None:
    policy = AdmittedPolicy(Fixed(threshold), build(name))
    inputs = make_inputs(policy.needs)
    admitted = inputs.memory[MEMORY] > threshold
    candidates = inputs.valid & (admitted | inputs.must_keep)
    keep = policy.decide(inputs, BUDGET).keep
    assert policy.dynamic
    assert not (keep & ~candidates).any(), "a refused token was chosen"
    assert (keep | ~inputs.must_keep).all()
    # As many as there are, up to the budget.
    assert torch.equal(keep.sum(-1), candidates.sum(-1).clamp(max=BUDGET))


def test_pages_are_filled_with_evicted_tokens_then_with_the_best_gates(
    build: Build,
) -> None:
    policy = AdmittedPolicy(Fixed(0.5), build("knorm"))
    inputs = make_inputs(policy.needs)
    gates = inputs.memory[MEMORY]
    admitted = inputs.valid & ((gates > 0.5) | inputs.must_keep)
    score = policy.decide(inputs, BUDGET).score
    refused = inputs.valid & ~admitted
    for row, gate, yes, no in zip(
        *(part.flatten(0, 2) for part in (score, gates, admitted, refused)), strict=True
    ):
        assert row[no].max() < row[yes].min()
        assert torch.equal(row[no].argsort(), gate[no].argsort())


def test_scores_that_are_no_numbers_stay_in_front_of_refused_tokens(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    eviction = build("knorm")
    policy = AdmittedPolicy(Fixed(0.5), eviction)
    inputs = make_inputs(policy.needs)
    nothing = torch.full(inputs.must_keep.shape, torch.nan)
    monkeypatch.setattr(eviction.scorer, "score", lambda *args: nothing)
    candidates = inputs.valid & ((inputs.memory[MEMORY] > 0.5) | inputs.must_keep)
    keep = policy.decide(inputs, BUDGET).keep
    assert torch.equal(keep.sum(-1), candidates.sum(-1).clamp(max=BUDGET))


@pytest.mark.parametrize("name", EVICTIONS)
def test_open_gates_change_nothing(name: str, build: Build) -> None:
    eviction = build(name)
    policy = AdmittedPolicy(Fixed(0.0), eviction)
    inputs = make_inputs(policy.needs)
    inputs = remembered(inputs, torch.ones_like(inputs.memory[MEMORY]))
    got, want = policy.decide(inputs, BUDGET), eviction.decide(inputs, BUDGET)
    assert torch.equal(got.keep, want.keep)
    assert torch.equal(got.score[inputs.valid], want.score[inputs.valid] / 2)
    assert set(got.memory) == {MEMORY, *want.memory}


def test_alone_it_keeps_what_is_admitted_whatever_the_budget() -> None:
    policy = AdmittedPolicy(Fixed(0.6), None)
    inputs = make_inputs(policy.needs)
    admitted = inputs.memory[MEMORY] > 0.6
    for budget in (1, BUDGET):
        keep = policy.decide(inputs, budget).keep
        assert torch.equal(keep, inputs.valid & (admitted | inputs.must_keep))


def test_new_tokens_are_evaluated_and_others_are_not() -> None:
    """Rows remember different numbers of tokens; what they know comes first."""
    admission = Fixed(0.5)
    policy = AdmittedPolicy(admission, None)
    inputs = make_inputs(policy.needs)
    width = inputs.must_keep.shape[-1]
    fresh = torch.tensor([31, 17, 0])[:, None, None, None]
    known = torch.arange(width) < inputs.lengths[..., None] - fresh
    inputs = remembered(inputs, torch.where(known, 0.25, 0.0))
    gates = policy.decide(replace(inputs, fresh_tokens=31), BUDGET).memory[MEMORY]
    token = torch.arange(width) / width
    is_new = inputs.valid & ~known
    assert torch.equal(gates[is_new], token.expand(gates.shape)[is_new])
    (asked,) = admission.asked
    assert asked.shape == (EVENTS, LAYERS, HEADS, 31)
    assert (asked < inputs.lengths[..., None]).all()
    # Nothing remembered changes, but that a row without new tokens asks for its last.
    last = torch.arange(width) == inputs.lengths[..., None] - 1
    assert (gates[known & ~last] == 0.25).all()


def test_a_gate_of_zero_is_remembered_as_evaluated() -> None:
    policy = AdmittedPolicy(Fixed(0.5), None)
    inputs = make_inputs(policy.needs)
    inputs = remembered(inputs, torch.zeros_like(inputs.memory[MEMORY]))
    gates = policy.decide(replace(inputs, fresh_tokens=40), BUDGET).memory[MEMORY]
    assert (gates[..., :40] > 0).all() and gates[..., 0].max() < 1e-30


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"needs": Needs(until=True)}, "decides"),
        ({"decides": True}, "decides"),
        ({"needs": Needs(until=True), "decides": True, "shift": 1}, "decides_later"),
    ],
)
def test_an_admission_declares_that_it_decides(
    attributes: dict[str, Any], name: str
) -> None:
    word = type("Admission", (BaseAdmission,), attributes)
    policy = registry.resolve(registry.PolicyInfo("mine", admission=word), {})
    with pytest.raises(ValueError, match=f"says the same by {name};"):
        assemble(policy)
