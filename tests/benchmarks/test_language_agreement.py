"""Tests of the language benchmark's agreement with full KV."""

import json
import math

import numpy as np
import pytest

from benchmarks.accuracy.servers import FULL
from benchmarks.language import agreement, parts
from benchmarks.language.agreement import ANSWER, PROMPT
from benchmarks.language.losses import first_event
from benchmarks.language.texts import Text
from support.language_model import MadeUpAsker
from vllm_kvpolicy.events import EventPlan

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
    references = part.prepare(asker, part.items(list, TEXTS, 2, ()), {})
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


@pytest.mark.parametrize(("budget", "interval"), [(256, 256), (512, 256), (384, 128)])
def test_events_have_equal_places_where_the_budget_is_a_multiple(budget, interval):
    own, forced = (
        EventPlan(length, budget, interval, interval).positions_up_to(1024)
        for length in (PROMPT, PROMPT + ANSWER)
    )
    assert own == forced
    assert own[0] == first_event(budget, interval)
