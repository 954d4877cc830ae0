"""Tests of the language benchmark's agreement with full KV."""

import json
import math
import random

import numpy as np
import pytest

from benchmarks.accuracy.servers import FULL
from benchmarks.language import agreement, parts
from benchmarks.language.agreement import ANSWER, PROMPT, Agreement
from benchmarks.language.losses import first_event
from benchmarks.language.texts import Text
from support.language_model import MadeUpAsker
from vllm_kvpolicy.events import EventPlan, positions_up_to

TEXTS = [Text(f"novel-{n}", "novel", tuple(range(n, n + 600))) for n in (1, 2)]
OTHERS = {1000 + token: math.log(0.01) for token in range(20)}


def next_of(before: tuple[int, ...]) -> int:
    """Return the right token: the last one plus one, never above 999."""
    return (before[-1] + 1) % 1000


def predict(policy: str, budget: int, before: tuple[int, ...]) -> dict[int, float]:
    """Predict the next token; `late` fails at one place, for good if it is its own."""
    right = next_of(before)
    if policy == "late" and len(before) == PROMPT + 300:
        return {right: math.log(0.2), right + 5: math.log(0.4), **OTHERS}
    return {right: math.log(0.6), **OTHERS}


def test_full_kv_agrees_with_itself():
    asker = MadeUpAsker(predict)
    part = parts.PARTS["agreement"]
    references = part.prepare(asker, part.items(list, TEXTS, 2), {})
    assert [one.id for one in references] == ["novel-1", "novel-2"]
    assert references[0].prompt_ids == TEXTS[0].token_ids[:PROMPT]
    assert references[0].answer_ids[:3] == (513, 514, 515)
    assert [len(one.distributions) for one in references] == [ANSWER, ANSWER]
    assert references[0].digest != references[1].digest
    for found in part.measure(asker, FULL, 512, references):
        kept = part.figures(found, 512, 256)
        assert kept == {"first": ANSWER, "equal": 1.0, "kl": 0.0, "top": 1.0}
        assert set(part.names) == set(kept)


def test_the_first_difference_ends_the_own_answer_but_not_the_comparison():
    asker = MadeUpAsker(predict)
    references = agreement.prepare(asker, TEXTS[:1], {})
    (found,) = agreement.measure(asker, "late", 256, references)
    assert found.is_same[:300].all()
    assert not found.is_same[300:].any()
    assert np.flatnonzero(~found.is_top).tolist() == [300]
    assert np.flatnonzero(found.divergence).tolist() == [300]
    kept = agreement.figures(found, 256, 256)
    # One answer token comes before the event at the prompt's end.
    assert kept["first"] == 300
    assert kept["equal"] == pytest.approx(299 / 511, abs=1e-4)
    assert kept["top"] == pytest.approx(510 / 511, abs=1e-4)
    # Full KV names the right token and 19 others of .01, the policy 18 of them.
    rest, rest_of_policy = 1 - 0.6 - 18 * 0.01, 1 - 0.2 - 18 * 0.01
    expected = 0.6 * math.log(0.6 / 0.2) + rest * math.log(rest / rest_of_policy)
    assert found.divergence[300] == pytest.approx(expected)
    assert kept["kl"] == pytest.approx(found.divergence[300] / 511, abs=1e-4)


def test_a_later_run_compares_with_the_answers_that_are_on_file():
    part = parts.PARTS["agreement"]
    (first,) = part.prepare(MadeUpAsker(predict), TEXTS[:1], {})
    on_file = json.loads(json.dumps(part.told(first)))

    def rounded_otherwise(
        policy: str, budget: int, before: tuple[int, ...]
    ) -> dict[int, float]:
        right, other = next_of(before), next_of(before) + 3
        if len(before) == PROMPT + 100:
            return {right: math.log(0.2), other: math.log(0.4), **OTHERS}
        return {right: math.log(0.6), **OTHERS}

    asker = MadeUpAsker(rounded_otherwise)
    (anew,) = part.prepare(asker, TEXTS[:1], {})
    (later,) = part.prepare(asker, TEXTS[:1], {first.id: on_file})
    assert anew.digest != first.digest
    assert later.digest == first.digest


def test_a_short_text_is_refused():
    text = Text("guide-1", "guide", tuple(range(500)))
    with pytest.raises(ValueError, match="text-tokens: got 500, expected at least 512"):
        agreement.prepare(MadeUpAsker(predict), [text], {})


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_divergence_is_a_lower_bound_of_that_of_the_whole(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 500)) * 3
    logits[1] = logits[0] + rng.normal(size=500) * seed / 4
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    whole = float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
    full, policy = (
        {int(token): float(one[token]) for token in np.argsort(-one)[:20]}
        for one in logs
    )
    found = agreement.divergence(full, policy)
    assert 0 <= found <= whole + 1e-9
    # Little is lost, and naming more tokens loses less.
    assert found > 0.3 * whole
    every = [{token: float(one[token]) for token in range(499)} for one in logs]
    assert found <= agreement.divergence(*every) + 1e-9
    assert agreement.divergence(*every) == pytest.approx(whole, rel=0.01)


def test_the_divergence_over_two_classes_by_hand():
    full = {3: math.log(0.5), 4: math.log(0.1)}
    policy = {3: math.log(0.25), 5: math.log(0.7)}
    assert agreement.divergence(full, policy) == pytest.approx(
        0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    )
    assert agreement.divergence(full, full) == 0


@pytest.mark.parametrize(("budget", "interval"), [(256, 256), (512, 256), (384, 128)])
def test_events_have_equal_places_where_the_budget_is_a_multiple(budget, interval):
    own, forced = (
        positions_up_to(EventPlan(length, budget, interval, interval), 1024)
        for length in (PROMPT, PROMPT + ANSWER)
    )
    assert own == forced
    assert own[0] == first_event(budget, interval)


def test_events_have_other_places_where_it_is_not():
    own, forced = (
        positions_up_to(EventPlan(length, 320, 256, 256), 1024)
        for length in (PROMPT, PROMPT + ANSWER)
    )
    assert own == [576, 832]
    assert forced == [512, 768]


def test_what_comes_before_the_first_event_is_left_out():
    rng = random.Random(0)
    same = np.array([rng.random() < 0.5 for _ in range(ANSWER)])
    divergence = np.arange(ANSWER) / 1000
    found = Agreement(same, divergence, same)
    kept = agreement.figures(found, 320, 256)
    assert kept["equal"] == pytest.approx(same[65:].mean(), abs=1e-4)
    assert kept["top"] == pytest.approx(same[1:].mean(), abs=1e-4)
    assert kept["kl"] == pytest.approx(divergence[1:].mean(), abs=1e-4)
    assert kept["first"] == int(np.argmin(same))


def test_a_budget_without_an_event_is_refused():
    ones = np.ones(ANSWER)
    with pytest.raises(
        ValueError, match="budget: got 1024 with interval 256, expected"
    ):
        agreement.figures(Agreement(ones == 1, ones, ones == 1), 1024, 256)
