"""Tests of fronts and of margins between them, computed by hand; pass@k."""

import numpy as np
import pytest

from benchmarks.accuracy import summary
from benchmarks.accuracy.groups import grouped
from benchmarks.accuracy.margins import front, margin, margins_of, mean_height
from benchmarks.accuracy.votes import COSTS, MEASURES, Choice, any_right, choices_of
from support.report_data import SETTINGS as MADE_SETTINGS

SETTINGS = MADE_SETTINGS | {"policy_config": {"wgkv_gates": "gates.safetensors"}}


def answers(policy: str, rights: list[str], task: str = "a:1", **changes) -> list[dict]:
    """Return answers of 100 tokens; a text per question, a letter per sample."""
    made = {"policy": policy, "budget": 128, "interval": 64, "task": task}
    if policy == "full":
        made |= {"budget": None, "interval": None}
    made |= {"score": 0.0, "prompt_tokens": 50, "output_tokens": 100}
    made |= {"capped": False, "repeated": None, **changes}
    return [
        made
        | {"id": str(number), "sample": sample}
        | {"answer": letter, "correct": letter == "r"}
        for number, text in enumerate(rights)
        for sample, letter in enumerate(text)
    ]


def array(*values) -> np.ndarray:
    return np.array(values, float)


def test_a_front_has_what_nothing_cheaper_equals():
    points = [(5, 0.5), (1, 0.0), (2, 0.3), (2, 0.2), (3, 0.3), (9, 0.4), (9, 0.6)]
    rows = [{"kv_read": cost, "passed": share} for cost, share in points]
    kept = [(r["kv_read"], r["passed"]) for r in front(rows, "kv_read", "passed")]
    assert kept == [(2, 0.3), (5, 0.5), (9, 0.6)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 5, (2 * 0.2 + 2 * 0.6) / 4),
        (0, 3, 0.2 * 2 / 3),
        (4, 9, (5 * 0.6 + 0 * 0.5) / 5),
        (0, 1, 0.0),
    ],
)
def test_the_height_of_a_front_is_that_of_its_steps(low, high, expected):
    """A dearer point that is worse changes nothing, in whatever order."""
    costs, shares = array(3, 6, 1, 2), array(0.6, 0.5, 0.2, 0.1)
    points = costs, shares, shares
    found = mean_height(points, array(low)[0], array(high)[0])
    assert found == pytest.approx(expected)
    both = mean_height(
        tuple(np.stack([each, each]) for each in points), *array([low] * 2, [high] * 2)
    )
    assert both == pytest.approx([expected] * 2)


def test_a_front_is_judged_by_other_shares_than_it_is_chosen_by():
    """Chosen: the first, from 2 on the second; the third is no better, the last is."""
    points = array(1, 2, 3, 4), array(0.2, 0.5, 0.5, 0.6), array(0.4, 0.1, 0.9, 0.3)
    found = mean_height(points, array(1)[0], array(6)[0])
    assert found == pytest.approx((0.4 + 2 * 0.1 + 2 * 0.3) / 5)


def test_the_margin_is_over_the_costs_that_both_cover():
    """Ours: 0.2 from 1, 0.6 from 3; theirs: 0.4 from 2 to 10. Shared: 2 to 6."""
    ours = array(1, 3, 6), *[array(0.2, 0.6, 0.6)] * 2
    theirs = array(2, 10), *[array(0.4, 0.9)] * 2
    value, low, high = margin(ours, theirs)
    assert (low, high) == (2, 6)
    assert value == pytest.approx((1 * 0.2 + 3 * 0.6) / 4 - 0.4)
    assert margin(theirs, ours)[0] == pytest.approx(-value)
    assert margin(ours, ours)[0] == 0
    assert np.isnan(margin(ours, (array(7, 8), *[array(0.1, 0.2)] * 2))[0])


def test_at_least_one_right_answer_that_is_not_too_long():
    samples = answers("full", ["wrw"])
    assert any_right(samples) and any_right(samples, 100)
    assert not any_right(samples, 99) and not any_right(samples[:1])
    rows = summary.summarise(answers("full", ["wwrw", "rwww"]), SETTINGS)["votes"]
    found = {
        row["width"]: (row["accuracy"], row["passed"])
        for row in rows
        if row["family"] == "a:1" and row["share"] == 1.0
    }
    assert found == {1: (0.5, 0.5), 2: (0.5, 0.5), 4: (0.0, 1.0)}


def test_margins_of_a_method_with_its_variants():
    """Half as many tokens read, the same answers: better where full has not begun."""
    rights = ["rr", "rr", "rr", "ww"]
    lines = answers("full", rights)
    # All is dropped at once: a step reads its own token only.
    lines += answers("wgkv:open", rights, dropped=[])
    lines += answers("wgkv:shut", rights, dropped=[[50, 50]])
    rows = list(margins_of(choices_of(grouped(lines), SETTINGS)))
    assert {(row["method"], row["against"]) for row in rows} == {("wgkv", "full")}
    assert {row["family"] for row in rows} == {"a:1", "all"}
    (row,) = [
        row
        for row in rows
        if (row["family"], row["cost"], row["measure"]) == ("all", "kv_read", "passed")
    ]
    # Costs of full: 25, 50 and 99 steps (the last token is not fed), once or twice.
    reads = {n: sum(range(51, 50 + n)) for n in (25, 50, 100)}
    assert (row["from"], row["to"]) == (reads[25], 2 * reads[100])
    # Full is right from the cost of whole answers on; ours for 50 tokens less a step,
    # which is below the cheapest of full.
    own = reads[100] - 99 * 50
    assert own > row["from"]
    gained = 0.75 * (reads[100] - own) / (row["to"] - row["from"])
    assert row["margin"] == pytest.approx(gained, abs=1e-4)
    assert 0 <= row["low"] <= row["margin"] <= row["high"] and row["problems"] == 4


def test_margins_are_over_questions_that_both_answered():
    lines = answers("full", ["rr", "rr", "ww"]) + answers("tova", ["rr", "rr"])
    rows = list(margins_of(choices_of(grouped(lines), SETTINGS)))
    assert rows and {row["problems"] for row in rows} == {2}
    # Nothing is dropped before 192 tokens, so that both are the same, in each resample.
    assert {(r["margin"], r["low"], r["high"]) for r in rows} == {(0.0, 0.0, 0.0)}


def test_more_choices_alone_give_no_margin():
    """All are right as often; the method has 15 choices at about full's costs."""
    rng = np.random.default_rng(0)
    questions = tuple(("a:1", str(number)) for number in range(40))
    margins, excluded = [], []
    for _ in range(20):
        choices = [
            Choice(
                ("full", None, None) if at is None else ("tova", at, 64),
                "a:1",
                1.0,
                None,
                width,
                questions,
                dict.fromkeys(MEASURES, rng.random(40) < 0.5),
                dict.fromkeys(COSTS, np.full(40, 100.0 * width + (at or 0))),
            )
            for at in (None, *range(5))
            for width in (1, 2, 3)
        ]
        row = next(margins_of(choices))
        margins.append(row["margin"])
        excluded.append(not row["low"] <= 0 <= row["high"])
    error = np.std(margins) / np.sqrt(len(margins))
    assert abs(np.mean(margins)) < 3 * error and error < 0.03
    assert sum(excluded) <= 3
