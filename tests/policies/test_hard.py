"""Hard-KV's sizes, selections and pairs, against loops over tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.brute_ams import best
from support.event_inputs import (
    EVENTS,
    HEADS,
    LAYERS,
    ROWS,
    SINKS,
    TOKENS,
    choose,
    make_inputs,
    marked,
    one_event,
    window_logits,
)
from support.words import built
from vllm_kvpolicy.kernels.window_usage import window_usage_ref
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.allocators.hard import (
    LEAST,
    PAPER,
    TEMPERATURE,
    HardAllocator,
    choose_merge,
    pair_up,
    scale_to,
)
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.names import ALLOCATORS

WINDOW, BUDGET, SHARP = 8, 70, 3.0


def hard(
    p: float = 0.9, lower: float = 0.25, upper: float = 4.0, **options: str
) -> HardAllocator:
    values = {"p": p, "lower": lower, "upper": upper, **options}
    named = {f"hard_{key}": value for key, value in values.items()}
    return built(ALLOCATORS["hard"], window=WINDOW, **named)


def case(**changes: Any) -> tuple[Tensor, EventInputs]:
    """Scores, and an event whose heads attend more or less sharply."""
    inputs = make_inputs(hard().needs, **changes)
    sharpness = torch.linspace(0.3, SHARP, LAYERS * HEADS).view(LAYERS, HEADS, 1, 1)
    score = torch.rand(
        inputs.must_keep.shape, generator=torch.Generator().manual_seed(1)
    )
    return score, replace(inputs, keys=inputs.keys * sharpness)


def nuclei(inputs: EventInputs, at: tuple[int, int, int], mass: float) -> list[list]:
    """Tokens of each row's nucleus by raw attention, best first."""
    found = []
    for probs in window_logits(inputs, at, WINDOW).amax(0).softmax(-1):
        best_first = probs.sort(descending=True)
        total, row = 0.0, []
        for prob, i in zip(*map(Tensor.tolist, best_first), strict=True):
            if total < mass:
                total, row = total + prob, [*row, i]
        found.append(row)
    return found


def test_unbounded_heads_keep_their_candidates() -> None:
    # A budget that sizes never reach, and no lower bound: sizes stay as counted.
    score, inputs = case()
    allocator = hard(0.6, 0.0, 9.0, mode="dynamic")
    got = choose(allocator, score, inputs, TOKENS).keep
    sizes = set()
    for at in ROWS:
        longest = max(len(rows) for rows in nuclei(inputs, at, 0.6))
        values = score[at].tolist()
        first = best(list(range(int(inputs.lengths[at]))), values, longest)
        assert marked(got, at) == set(first) | marked(inputs.must_keep, at)
        sizes.add(len(marked(got, at)))
    assert len(sizes) > 6


def test_by_their_own_attention_heads_keep_what_got_a_vote() -> None:
    score, inputs = case()
    allocator = hard(p=0.6, lower=0.0, upper=9.0, order="attention", mode="dynamic")
    got = choose(allocator, score, inputs, TOKENS)
    for at in ROWS:
        rows = nuclei(inputs, at, 0.6)
        assert marked(got.keep, at) == set().union(*rows) | marked(inputs.must_keep, at)
        votes = [sum(i in row for row in rows) for i in range(TOKENS)]
        both = list(zip(votes, score[at].tolist(), strict=True))
        held = range(int(inputs.lengths[at]))
        by_votes = sorted(held, key=both.__getitem__)
        assert by_votes == sorted(held, key=got.score[at].tolist().__getitem__)


def test_under_a_cap_votes_decide_before_scores() -> None:
    score, inputs = case()
    allocator = hard(p=0.9, lower=0.25, upper=1.0, order="attention")
    got = choose(allocator, score, inputs, 60)
    assert (got.keep.sum(-1) == 60).all()
    for at in ROWS:
        must = marked(inputs.must_keep, at)
        others = [i for i in range(int(inputs.lengths[at])) if i not in must]
        first = best(others, got.score[at].tolist(), 60 - len(must))
        assert marked(got.keep, at) == must | set(first)


def calibrated(score: Tensor, inputs: EventInputs) -> Decision:
    allocator = hard(0.6, 0.0, 9.0, order="calibrated", mode="dynamic")
    return choose(allocator, score, inputs, TOKENS)


def first_event() -> tuple[Tensor, EventInputs]:
    """Positive scores, as of attention, and nothing remembered."""
    score, inputs = case()
    nothing = {TEMPERATURE: torch.zeros_like(score)}
    return score**4, replace(inputs, memory=nothing)


def test_temperatures_give_attentions_sizes_at_a_first_event() -> None:
    score, inputs = first_event()
    allocator = hard(0.6, 0.0, 9.0, mode="dynamic")
    assert torch.equal(
        calibrated(score, inputs).keep, choose(allocator, score, inputs, TOKENS).keep
    )


def top_p(logits: Tensor, mass: float) -> int:
    """Length of the shortest best part of softmax(logits) that holds `mass`."""
    falling = torch.softmax(logits.double(), 0).sort(descending=True).values.tolist()
    count = total = 0
    while total < mass:
        count, total = count + 1, total + falling[count]
    return count


def test_later_sizes_are_of_the_scores_at_remembered_temperatures() -> None:
    score, inputs = first_event()
    memory = calibrated(score, inputs).memory
    later = replace(inputs, queries=inputs.queries * 5, memory=memory)
    got, sharper = calibrated(score, later), calibrated(score**2, later)
    assert torch.equal(got.keep, calibrated(score, inputs).keep)
    assert torch.equal(sharper.memory[TEMPERATURE], memory[TEMPERATURE])
    for at in ROWS:
        row, length = (score**2)[at], int(inputs.lengths[at])
        share = (row[:length].double() - row[:length].min()) / row[:length].max()
        size = top_p((share + LEAST).log() / memory[TEMPERATURE][at][0], 0.6)
        first = best(list(range(length)), row.tolist(), size)
        assert marked(sharper.keep, at) == set(first) | marked(inputs.must_keep, at)
    assert (sharper.keep.sum(-1) < got.keep.sum(-1)).sum() > len(ROWS) / 2


def test_few_candidates_leave_the_temperature_to_a_later_event() -> None:
    """Fewer than attention wants are all that can be chosen from."""
    score, inputs = first_event()
    few = inputs.must_keep | (torch.arange(TOKENS) % 8 == 0) & inputs.valid
    hidden = score.masked_fill(~few, -torch.inf)
    got = calibrated(hidden, replace(inputs, candidates=few)).memory[TEMPERATURE]
    free = calibrated(score, inputs).keep.sum(-1)
    lacks = got[..., 0] == 0
    assert lacks.any() and not lacks.all()
    later = replace(inputs, memory={TEMPERATURE: got})
    assert torch.equal(calibrated(score, later).keep.sum(-1)[lacks], free[lacks])


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("is_hinted", [False, True])
def test_a_broken_score_changes_no_other_size(broken: float, is_hinted: bool) -> None:
    score, inputs = first_event()
    inputs = replace(inputs, memory=calibrated(score, inputs).memory)
    odd, token = score.clone(), SINKS + 3
    odd[..., token] = broken
    if is_hinted:  # as a composed policy gives them
        lowest = torch.finfo(odd.dtype).min
        odd = odd.nan_to_num(nan=lowest, neginf=lowest, posinf=torch.inf)
        inputs = replace(inputs, candidates=inputs.valid)
    got = calibrated(odd, inputs).keep.sum(-1) - calibrated(score, inputs).keep.sum(-1)
    assert (got.abs() <= 1).all()


def test_the_papers_budget_caps_each_head() -> None:
    score, inputs = first_event()
    paper = PAPER | {"window": WINDOW, "hard_p": 0.6}
    allocator = built(ALLOCATORS["hard"], **paper)
    got = choose(allocator, score, inputs, BUDGET).keep.sum(-1)
    free = calibrated(score, inputs).keep.sum(-1)
    assert torch.equal(got, free.clamp(max=BUDGET))
    assert (got < BUDGET).any() and (got == BUDGET).any()


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_fixed_total_and_bounds(scope: str) -> None:
    score, inputs = case()
    allocator = hard(0.9, 0.8, 1.5, scope=scope)
    count = choose(allocator, score, inputs, BUDGET).keep.sum(-1)
    per_layer = count.sum(-1)
    assert (per_layer.sum(-1) == LAYERS * HEADS * BUDGET).all()
    assert (per_layer == HEADS * BUDGET).all() == (scope == "layer")
    low = (0.8 * BUDGET) - 1
    assert (count > low).all() and (count <= 1.5 * BUDGET).all()
    # Sharper heads come later.
    assert (count[:, 0, 0] > count[:, 1, 1]).all()


@pytest.mark.parametrize(
    ("scope", "axes", "heads"),
    [("model", (1, 2, 3), LAYERS * HEADS), ("layer", (2, 3), HEADS)],
)
def test_dynamic_spends_no_more_than_the_budget(
    scope: str, axes: tuple[int, ...], heads: int
) -> None:
    score, inputs = case()
    dynamic = hard(0.9, 0.0, 9.0, mode="dynamic", scope=scope)
    fixed = hard(0.9, 0.0, 9.0, scope=scope)
    free = choose(dynamic, score, inputs, TOKENS).keep.sum(axes)
    for budget in (55, 80, 130, 150):
        got = choose(dynamic, score, inputs, budget).keep
        assert torch.equal(got.sum(axes), free.clamp(max=budget * heads))
        same = choose(fixed, score, inputs, budget).keep
        full = free >= budget * heads
        assert torch.equal(got[full], same[full])


def scaled(sizes: list[int], total: int, low: int, high: int) -> list[int]:
    row = torch.tensor([sizes])
    bounds = torch.full_like(row, low), torch.full_like(row, high)
    return scale_to(torch.tensor([total]), row, *bounds)[0].tolist()


def test_sizes_scale_with_the_total() -> None:
    assert scaled([10, 30, 60], 100, 0, 999) == [10, 30, 60]
    assert scaled([10, 30, 60], 50, 0, 999) == [5, 15, 30]
    assert scaled([10, 30, 60], 1000, 0, 999) == [100, 300, 600]
    # 3.5, 3.5, 3: the first of equal remainders rounds up.
    assert scaled([7, 7, 6], 10, 0, 999) == [4, 3, 3]
    # 1.4, 2.8, 2.8: largest remainders.
    assert scaled([10, 20, 20], 7, 0, 999) == [1, 3, 3]


def test_bounds_pass_the_rest_on_evenly() -> None:
    assert scaled([10, 30, 60], 50, 8, 999) == [8, 14, 28]
    assert scaled([10, 30, 60], 200, 0, 90) == [35, 75, 90]
    assert scaled([20, 20, 60], 50, 20, 60) == [20, 20, 20]
    assert scaled([20, 20, 60], 300, 20, 60) == [60, 60, 60]


# -- pairs -----------------------------------------------------------------------------

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
        logits, score = window_logits(inputs, at, WINDOW), got.score[at].tolist()
        mass = logits.softmax(-1).mean((0, 1)).tolist()
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
