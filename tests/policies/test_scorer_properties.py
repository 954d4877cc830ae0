"""What holds for every scorer of the package, on ragged and padded events."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from support.event_inputs import (
    EVENTS,
    HEADS,
    LENGTHS,
    SHORTEST,
    TOKENS,
    make_inputs,
    one_event,
)
from support.scorer_cases import CASES, READ_ALL_HEADS, case_id
from vllm_kvpolicy.kernels.ranking import leading_run
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.compose import measure_usage
from vllm_kvpolicy.policies.words import BaseScorer

FIELDS = ("keys", "values", "queries")
# Of the same sums a matrix product may order its own by shape.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


def label(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join(map(case_id, case))


these = partial(pytest.mark.parametrize, "policy", indirect=True, ids=label)


@pytest.fixture(params=CASES, ids=label)
def policy(request: pytest.FixtureRequest, build: Callable[..., Any]) -> Any:
    return build(*request.param)


@pytest.fixture
def scorer(policy: Any) -> BaseScorer:
    return policy.scorer


@pytest.fixture
def inputs(scorer: BaseScorer) -> EventInputs:
    return make_inputs(scorer.needs)


def score(scorer: BaseScorer, inputs: EventInputs) -> Tensor:
    """Score, NaN on padding."""
    usage = measure_usage(scorer.needs, inputs)
    got = scorer.score(inputs, usage)
    assert got.shape == inputs.must_keep.shape and got.dtype == torch.float32
    return got.masked_fill(~inputs.valid, torch.nan)


def check_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, equal_nan=True, **TOLERANCE)


def test_scores_are_finite_whatever_padding_holds(
    scorer: BaseScorer, inputs: EventInputs
) -> None:
    got = score(scorer, inputs)
    assert torch.isfinite(got[inputs.valid]).all()
    for fill in (3.0, torch.inf):
        padding = ~inputs.valid[..., None]
        filled = {
            field: getattr(inputs, field).masked_fill(padding, fill)
            for field in FIELDS[:2]
            if getattr(inputs, field) is not None
        }
        assert torch.equal(
            score(scorer, replace(inputs, **filled))[inputs.valid], got[inputs.valid]
        )


@pytest.mark.parametrize("event", range(EVENTS))
def test_an_event_is_scored_alone(
    scorer: BaseScorer, inputs: EventInputs, event: int
) -> None:
    batch = score(scorer, inputs)
    longest = max(max(heads) for heads in LENGTHS[event])
    for width in {longest, min(longest + 5, TOKENS), TOKENS}:
        alone = score(scorer, one_event(inputs, event, width))
        check_same(alone[0], batch[event, ..., :width])


@these([case for case in CASES if case not in READ_ALL_HEADS])
def test_a_head_is_scored_alone(scorer: BaseScorer, inputs: EventInputs) -> None:
    """What a head gets does not depend on how much the others hold, or what."""
    want = score(scorer, inputs)
    for head in range(HEADS):
        others = torch.arange(HEADS) != head
        lengths = torch.where(others, 70, inputs.lengths)
        must_keep = inputs.must_keep & (torch.arange(TOKENS) < lengths[..., None])
        changed = {
            field: getattr(inputs, field).masked_fill(others[:, None, None], torch.nan)
            for field in FIELDS[:2]
            if getattr(inputs, field) is not None
        }
        got = score(
            scorer, replace(inputs, lengths=lengths, must_keep=must_keep, **changed)
        )
        check_same(got[:, :, head], want[:, :, head])


@these([c for c in CASES if c[0] != "snapmax" and "segment" not in c[1].values()])
def test_of_what_must_stay_sinks_alone_count(
    scorer: BaseScorer, inputs: EventInputs
) -> None:
    """Local tokens are scored as others are."""
    sinks = replace(inputs, must_keep=leading_run(inputs.must_keep))
    check_same(score(scorer, sinks), score(scorer, inputs))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_numbers_break_no_other_event(policy: Any, broken: float) -> None:
    inputs = make_inputs(policy.needs)
    read = [field for field in FIELDS if getattr(inputs, field) is not None]
    if not read:
        pytest.skip("reads no keys, values or queries")
    want = policy.decide(inputs, SHORTEST).keep
    for field in read:
        changed = getattr(inputs, field).clone()
        changed[0, :, :, 10:12, 0] = broken
        keep = policy.decide(replace(inputs, **{field: changed}), SHORTEST).keep
        assert (keep.sum(-1) == SHORTEST).all()
        assert (keep | ~inputs.must_keep).all() and not (keep & ~inputs.valid).any()
        assert torch.equal(keep[1:], want[1:])


def test_works_in_bfloat16(scorer: BaseScorer) -> None:
    inputs = make_inputs(scorer.needs, dtype=torch.bfloat16)
    assert torch.isfinite(score(scorer, inputs)[inputs.valid]).all()


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_requests(scorer: BaseScorer, length: int) -> None:
    inputs = make_inputs(
        scorer.needs, lengths=[[[length] * 2] * 2], local=[1], width=8, sinks=0
    )
    assert torch.isfinite(score(scorer, inputs)[inputs.valid]).all()
