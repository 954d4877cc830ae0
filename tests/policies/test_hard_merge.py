"""Hard-KV's pairs: against loops over tokens, and what the option leaves as it is."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from support.event_inputs import EVENTS, GROUP, ROWS, TOKENS, make_inputs, one_event
from vllm_kvpolicy.kernels.window_usage import window_usage_ref
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.allocators.hard import choose_merge, pair_up
from vllm_kvpolicy.policies.base import Decision, EventInputs

WINDOW, BUDGET = 8, 70
OPTIONS = {"window": WINDOW, "hard_merge": True}
NAMES = ("hard-snapkv", "hard-keydiff", "hard-tova")


def decide(
    name: str = "hard-snapkv",
    inputs: EventInputs | None = None,
    budget: int = BUDGET,
    **options: Any,
) -> tuple[EventInputs, Decision]:
    policy = factory.build(name, OPTIONS | options)
    if inputs is None:
        inputs = make_inputs(policy.needs)
        inputs = replace(inputs, keys=inputs.keys * 2)
    return inputs, policy.decide(inputs, budget)


def attention(inputs: EventInputs, at: tuple[int, int, int]) -> list[float]:
    """Mean over window and group of the probability of each token."""
    e, layer, head = at
    length, rows = int(inputs.lengths[at]), []
    keys = inputs.keys[at][:length].double()
    for g, w in product(range(GROUP), range(WINDOW)):
        query = inputs.queries[e, layer, head * GROUP + g, w - WINDOW].double()
        seen = length - WINDOW + w + 1
        probs = torch.softmax(keys[:seen] @ query * inputs.scale, 0)
        rows.append(torch.nn.functional.pad(probs, (0, length - seen)))
    return torch.stack(rows).mean(0).tolist()


def test_what_goes_first_is_merged_into_nothing() -> None:
    inputs, _ = decide()
    candidates = inputs.must_keep | (torch.arange(TOKENS) % 3 > 0)
    _, got = decide(inputs=replace(inputs, candidates=candidates))
    assert got.merge is not None
    partner = got.merge.partner
    taken = candidates.gather(-1, partner.clamp_min(0))
    assert (partner >= 0).any() and (taken | (partner < 0)).all()


@pytest.mark.parametrize("budget", [60, 100])
@pytest.mark.parametrize("name", NAMES)
def test_the_strongest_survivor_takes_the_weakest(name: str, budget: int) -> None:
    inputs, got = decide(name, budget=budget)
    assert got.merge is not None
    spare_dropped = spare_survivors = False
    for at in ROWS:
        held = range(int(inputs.lengths[at]))
        free = [i for i in held if not inputs.must_keep[at][i]]
        survivors = [i for i in free if got.keep[at][i]]
        dropped = [i for i in free if not got.keep[at][i]]
        mass, score = attention(inputs, at), got.score[at].tolist()
        # Stable sorts of later positions first: the project's order of ties.
        survivors.sort(key=lambda i: (mass[i], i), reverse=True)
        dropped.sort(key=lambda i: (score[i], i), reverse=True)
        count = min(len(survivors), len(dropped))
        spare_dropped |= len(dropped) > count
        spare_survivors |= len(survivors) > count
        pairs = dict(zip(survivors, reversed(dropped[:count]), strict=False))
        partner, weight = got.merge.partner[at], got.merge.weight[at]
        for i in range(TOKENS):
            assert partner[i] == pairs.get(i, -1), (at, i)
            share = mass[i] / (mass[i] + mass[pairs[i]]) if i in pairs else 1.0
            assert float(weight[i]) == pytest.approx(share, abs=1e-5)
    assert spare_survivors if budget == 100 else spare_dropped


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["method", "attention"])
def test_the_choice_does_not_depend_on_it(name: str, order: str) -> None:
    inputs, merged = decide(name, hard_order=order)
    _, plain = decide(name, inputs, hard_order=order, hard_merge=False)
    assert torch.equal(merged.keep, plain.keep)
    valid = inputs.valid
    assert torch.equal(merged.score[valid], plain.score[valid])
    assert merged.merge is not None and (merged.merge.partner >= 0).any()


def test_it_is_off_by_default() -> None:
    policy = factory.build("hard-snapkv", {"window": WINDOW})
    assert not policy.needs.values
    assert policy.decide(make_inputs(policy.needs), BUDGET).merge is None
    assert factory.build("hard-snapkv", OPTIONS).needs.values


def test_events_do_not_see_their_neighbours_or_padding() -> None:
    inputs, together = decide()
    for event in range(EVENTS):
        width = int(inputs.lengths[event].max())
        _, alone = decide(inputs=one_event(inputs, event, width))
        for name in ("partner", "weight"):
            expected = getattr(together.merge, name)[event, ..., :width]
            assert torch.equal(getattr(alone.merge, name)[0], expected)


def test_unattended_pairs_keep_the_survivor() -> None:
    policy = factory.build("hard-snapkv", OPTIONS)
    inputs = make_inputs(policy.needs)
    # Next to keys this loud no other token gets any attention at all.
    queries = torch.ones_like(inputs.queries)
    keys = torch.where(inputs.must_keep[..., None], 1e4, inputs.keys)
    got = policy.decide(replace(inputs, keys=keys, queries=queries), BUDGET)
    assert (got.merge.partner >= 0).any()
    assert (got.merge.weight == 1).all()


def test_tokens_that_must_stay_are_in_no_pair() -> None:
    inputs, got = decide()
    # A budget below them leaves some out of the choice, and they stay all the same.
    keep = got.keep & (torch.arange(TOKENS) % 3 > 0)
    window = (inputs.queries, inputs.paged("keys"), inputs.lengths, inputs.scale)
    usage = window_usage_ref(*window).mean
    merge = choose_merge(keep, got.score, inputs, usage)
    is_paired = merge.partner >= 0
    assert (inputs.must_keep & ~keep & inputs.valid).any() and is_paired.any()
    assert not (is_paired & (inputs.must_keep | ~keep)).any()
    taken_in = torch.zeros(*keep.shape[:-1], TOKENS + 1, dtype=torch.bool)
    taken_in.scatter_(-1, merge.partner.where(is_paired, TOKENS), True)
    assert not (taken_in[..., :-1] & (inputs.must_keep | keep | ~inputs.valid)).any()


def test_ties_and_unscored_tokens_by_hand() -> None:
    nan = torch.nan
    got = pair_up(
        strong=torch.tensor([0, 1, 1, 1, 0, 0, 0], dtype=torch.bool),
        weak=torch.tensor([0, 0, 0, 0, 1, 1, 0], dtype=torch.bool),
        attention=torch.tensor([9.0, 0.2, 0.2, 0.1, 9.0, 9.0, 9.0]),
        order=torch.tensor([9.0, 9.0, 9.0, 9.0, nan, -5.0, nan]),
    )
    # Of the equal ones the later is the stronger; the unscored token is the weaker.
    assert got.tolist() == [-1, 5, 4, -1, -1, -1, -1]
