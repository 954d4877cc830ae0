"""Tests of the summary: counts, paired tests, cost in KV tokens, majority votes."""

from random import Random

import pytest

from benchmarks.accuracy import groups, pairs, summary
from benchmarks.accuracy.cost import bounded_cost, cost_of, full_cost
from benchmarks.accuracy.groups import grouped
from benchmarks.accuracy.questions import digest_of
from reasoner.problems import generate
from support.report_data import SETTINGS
from vllm_kvpolicy.config import KVPolicyConfig


def line(correct: bool = True, number: int = 0, **changes) -> dict:
    """Return a line of an output file; a wrong answer has half of the right trace."""
    task = changes.get("task", "copy:10")
    family, _, size = task.partition(":")
    problem = generate(family, int(size), number)
    half = problem.trace[: len(problem.trace) // 2]
    made = {"policy": "tova", "budget": 128, "interval": 64, "task": task}
    made |= {"id": str(number), "sample": 0}
    made |= {"digest": digest_of(problem.prompt, [problem.answer]), "correct": correct}
    made |= {"score": float(correct), "answer": "5" if correct else "6"}
    made |= {"prompt_tokens": 50, "output_tokens": 100, "capped": not correct}
    made |= {
        "repeated": {"4": 0.5, "8": 0.25},
        "text": problem.completion if correct else half,
    }
    return made | changes


def full(correct: bool = True, number: int = 0, **changes) -> dict:
    none = {"policy": "full", "budget": None, "interval": None}
    return line(correct, number, **none, **changes)


def test_rows_count_tasks_and_all():
    lines = [line(number < 15, number) for number in range(20)]
    others = {"task": "sub:10", "output_tokens": 50, "repeated": None}
    lines += [line(True, number, **others) for number in range(20)]
    Random(0).shuffle(lines)
    rows = {row["family"]: row for row in summary.summarise(lines, SETTINGS)["summary"]}
    assert list(rows) == ["copy:10", "sub:10", "all"]
    assert rows["copy:10"]["correct"] == 15 and rows["copy:10"]["capped"] == 0.25
    assert rows["all"]["problems"] == 40 and rows["all"]["accuracy"] == 35 / 40
    assert rows["all"]["mean_output_tokens"] == 75
    assert rows["copy:10"]["low"] < 0.75 < rows["copy:10"]["high"]
    assert rows["sub:10"]["repeated"] is None
    assert rows["all"]["repeated"] == {"4": 0.5, "8": 0.25}
    text = summary.format_summary(list(rows.values()))
    assert "| 15/20   | 75.0 [53.1, 88.8]" in text
    assert "% prefix [95 %]" in text


def test_rows_and_pairs_have_partial_scores():
    """Half of a trace of 11 lines is 5 lines and a half; a question counts once."""
    lines = [line(number < 15, number) for number in range(20)]
    lines += [line(True, number, policy="ams-tova") for number in range(20)]
    found = summary.summarise(lines, SETTINGS)
    row = next(r for r in found["summary"] if r["policy"] == "tova")
    lengths = [len(generate("copy", 10, number).trace) for number in range(15, 20)]
    halves = [(length // 2) / length for length in lengths]
    assert row["prefix"]["mean"] == pytest.approx((15 + sum(halves)) / 20, abs=1e-4)
    assert row["lines"]["mean"] == pytest.approx((15 + 5 * 5 / 11) / 20, abs=1e-4)
    for score in ("prefix", "lines"):
        assert row[score]["low"] < row[score]["mean"] < row[score]["high"] <= 1
    pair = next(pair for pair in found["pairs"] if pair["family"] == "all")
    for score in ("prefix", "lines"):
        assert pair[score]["mean"] == pytest.approx(1 - row[score]["mean"], abs=2e-4)
        assert 0 < pair[score]["low"] < pair[score]["high"]
        # Five questions differ, all in one direction.
        assert pair[score]["p"] == 2 / 2**5
    assert "+13.6 [" in pairs.format_pairs([pair])


def test_pairs_say_which_policy_repeats_itself():
    lines = [line(number=number) for number in range(12)]
    less = {"4": 0.5, "8": 0.125}
    lines += [line(True, n, policy="ams-tova", repeated=less) for n in range(12)]
    found = summary.summarise(lines, SETTINGS)
    pair = next(pair for pair in found["pairs"] if pair["family"] == "all")
    assert (pair["against"], pair["repeated"]["mean"]) == ("tova", -0.125)
    assert pair["repeated"]["p"] == pytest.approx(2 / 2**12, abs=1e-6)
    lines[-1]["repeated"] = None
    found = summary.summarise(lines, SETTINGS)
    assert not any(pair["repeated"] for pair in found["pairs"])


def test_the_order_of_lines_changes_nothing():
    lines = [full(n % 3 > 0, n) for n in range(12)]
    for policy in ("tova", "ams-tova", "keydiff"):
        for budget in (96, 128):
            lines += [
                line(n % 2 > 0, n, policy=policy, budget=budget) for n in range(12)
            ]
    expected = summary.summarise(lines, SETTINGS)
    assert [row["policy"] for row in expected["summary"]][0] == "full"
    for seed in range(3):
        Random(seed).shuffle(lines)
        assert summary.summarise(lines, SETTINGS) == expected


def test_policies_meet_full_and_their_base_scorer():
    ours = {"policy": "ams-tova"}
    lines = [full(True, n) for n in range(10)]
    lines += [line(n < 6, n) for n in range(10)]
    lines += [line(n in (0, 1, 2, 8), n, **ours) for n in range(10)]
    lines += [line(True, 77, **ours)]  # asked of nobody else
    met = {
        (row["policy"], row["against"]): row
        for row in summary.summarise(lines, SETTINGS)["pairs"]
        if row["family"] == "copy:10"
    }
    assert set(met) == {("tova", "full"), ("ams-tova", "full"), ("ams-tova", "tova")}
    row = met["ams-tova", "tova"]
    assert (row["pairs"], row["only_policy"], row["only_other"]) == (10, 1, 3)
    assert row["p"] == pytest.approx(2 * (1 + 4) / 2**4)
    row = met["tova", "full"]
    assert (row["only_policy"], row["only_other"]) == (0, 4)
    assert row["p"] == pytest.approx(2 / 2**4)
    assert "| ams-tova | 128    | 64" in pairs.format_pairs(list(met.values()))


def test_ams_meets_equal_quotas_for_equal_blocks():
    assert pairs.bases_of("ams-rkv") == ["full", "rkv", "strat-rkv"]
    assert pairs.bases_of("strat-rkv") == ["full", "rkv"]
    variants = ["full", "ams-rkv", "rkv", "rkv:x", "strat-rkv"]
    assert pairs.bases_of("ams-rkv:x") == variants
    assert pairs.bases_of("rkv") == ["full", "random"]
    for other in ("quest", "dms", "wgkv+quest", "identity"):
        assert pairs.NO_SCORER not in pairs.bases_of(other)
    assert pairs.bases_of("wgkv:x") == ["full", "wgkv"]
    assert pairs.bases_of("random") == ["full"] and pairs.bases_of("full") == []


def test_several_samples_are_no_more_questions():
    """Four samples of each question count as one pair and widen no sample size."""
    lines = [full(True, n, sample=s) for n in range(6) for s in range(4)]
    lines += [line(s == 3, n, sample=s) for n in range(6) for s in range(4)]
    found = summary.summarise(lines, SETTINGS)
    (pair,) = [row for row in found["pairs"] if row["family"] == "copy:10"]
    assert (pair["pairs"], pair["only_policy"], pair["only_other"]) == (6, 0, 6)
    assert pair["p"] == pytest.approx(2 / 64)
    once = [full(True, n) for n in range(6)]
    one = summary.summarise(once, SETTINGS)["summary"][0]
    row = found["summary"][0]
    assert (row["policy"], row["problems"], row["answers"]) == ("full", 6, 24)
    assert (row["accuracy"], row["low"], row["high"]) == (1, one["low"], one["high"])
    quarter = found["summary"][1]
    assert quarter["accuracy"] == 0.25
    assert quarter["low"] < 0.1 and quarter["high"] > 0.6


def test_a_base_that_reads_no_budget_is_met_at_each():
    """`wgkv` runs at the first budget only, at each interval."""
    lines = [
        line(True, 0, policy=policy, budget=budget, interval=interval)
        for interval in (64, 96)
        for policy, budget in [
            *(("wgkv:x", 128), ("wgkv+snapkv:x", 128), ("wgkv+snapkv:x", 192)),
            *(("snapkv", 128), ("snapkv", 192)),
        ]
    ]
    found = [
        (row["budget"], row["interval"], row["against"])
        for row in pairs.pairs_of(grouped(lines))
        if row["family"] == "all" and row["policy"] == "wgkv+snapkv:x"
    ]
    assert sorted(found) == [
        (budget, interval, against)
        for budget in (128, 192)
        for interval in (64, 96)
        for against in ("snapkv", "wgkv:x")
    ]
    del lines[0]
    assert not [
        row
        for row in pairs.pairs_of(grouped(lines))
        if (row["interval"], row["against"]) == (64, "wgkv:x")
    ]


def held_tokens(prompt: int, output: int, budget: int, interval: int, block: int):
    """Return what each decode step reads and the most blocks held, step by step."""
    held, next_event, reads, most = 0, budget + interval, [], 0
    blocks = 0
    for position in range(prompt + output - 1):
        if position == next_event and position > prompt:
            local = position - (position - 32) // block * block
            kept = -(-(budget - local) // block) * block
            held, next_event = kept + local, next_event + interval
            blocks = kept // block + -(-local // block)
            first_local = position - local
        held += 1
        if next_event > budget + interval:
            local_blocks = -(-(position + 1 - first_local) // block)
            blocks = kept // block + local_blocks
        else:
            blocks = -(-(position + 1) // block)
        most = max(most, blocks)
        if position >= prompt:
            reads.append(held)
    return reads, most * block


@pytest.mark.parametrize("output", [1, 2, 100, 143, 144, 145, 400, 1001])
@pytest.mark.parametrize(("budget", "interval"), [(128, 64), (96, 40)])
def test_cost_step_by_step(output, budget, interval):
    reads, most = held_tokens(50, output, budget, interval, 32)
    config = KVPolicyConfig.from_dict(
        {"policy": "keydiff", "budget": budget, "interval": interval}
    )
    assert bounded_cost(50, output, config.footprint(50, 32, 4)) == (sum(reads), most)
    changes = {"output_tokens": output, "budget": budget, "interval": interval}
    cost = cost_of(line(policy="keydiff", **changes), SETTINGS)
    assert cost == (sum(reads), most)


def test_cost_without_a_policy():
    assert full_cost(50, 4, 32) == (51 + 52 + 53, 64)
    assert full_cost(50, 1, 32) == (0, 64)
    assert full_cost(50, 16, 32)[1] == 96
    assert cost_of(full(), SETTINGS) == full_cost(50, 100, 32)
    assert cost_of(full(), SETTINGS, length=4) == full_cost(50, 4, 32)


def test_a_kept_prompt_costs_more_under_any_policy():
    lines = line(policy="snapkv", prompt_tokens=300, output_tokens=600)
    kept = SETTINGS | {"evict_prompts": False, "keep_prompts": True}
    own = SETTINGS | {"evict_prompts": False}
    assert cost_of(lines, kept)[0] > cost_of(lines, own)[0]


@pytest.mark.parametrize("answers", ["5", "6", "565", "65", "--5", "---"])
def test_the_majority_wins_and_the_first_of_equals(answers):
    samples = [
        line(text == "5", sample=n, answer=None if text == "-" else text)
        for n, text in enumerate(answers)
    ]
    assert groups.majority(samples, 100) is (answers in ("5", "565", "--5"))


def test_long_answers_do_not_vote():
    samples = [line(False, output_tokens=100), line(True, output_tokens=20)]
    assert not groups.majority(samples, 100)
    assert groups.majority(samples, 99)
    assert not groups.majority(samples, 19)


def test_votes_over_lengths_and_widths():
    lines = []
    for number in range(8):
        for sample in range(4):
            right = sample > 0 or number < 2
            tokens = 200 if sample == 3 else 100
            more = {"sample": sample, "output_tokens": tokens}
            lines.append(line(right, number, **more))
    votes = summary.summarise(lines, SETTINGS)["votes"]
    pooled = [row for row in votes if row["family"] == "all"]
    votes = [row for row in votes if row["family"] == "copy:10"]
    # One task: all together are the same, but for the length, which is by task.
    for alone, row in zip(votes, pooled, strict=True):
        assert row == alone | {"family": "all", "length": None}
    found = {(row["length"], row["width"]): row for row in votes}
    assert set(found) == {(length, w) for length in (50, 100, 200) for w in (1, 2, 4)}
    assert [found[200, w]["correct"] for w in (1, 2, 4)] == [2, 2, 8]
    assert found[50, 4]["correct"] == 0
    one, four = found[200, 1], found[200, 4]
    assert one["kv_read"] == cost_of(lines[0], SETTINGS)[0]
    longest = cost_of(lines[3], SETTINGS)
    assert four["kv_read"] == 3 * one["kv_read"] + longest[0]
    assert four["kv_peak"] == 3 * one["kv_peak"] + longest[1]
    assert found[50, 1]["kv_read"] == cost_of(lines[0], SETTINGS, 50)[0]


def test_votes_of_all_tasks_need_every_task_and_limit_each_by_its_own():
    def answers(task, tokens, samples, right):
        more = {"task": task, "output_tokens": tokens}
        return [
            line(right, n, sample=s, **more) for n in (0, 1) for s in range(samples)
        ]

    lines = answers("copy:10", 100, 4, True) + answers("sub:10", 400, 2, False)
    rows = summary.summarise(lines, SETTINGS)["votes"]
    widths: dict[str, set] = {}
    for row in rows:
        widths.setdefault(row["family"], set()).add(row["width"])
    assert widths == {"copy:10": {1, 2, 4}, "sub:10": {1, 2}, "all": {1, 2}}
    pooled = [row for row in rows if row["family"] == "all"]
    for row in pooled:
        # Each answer is as long as its task's longest: short limits let none vote.
        assert row["correct"] == (2 if row["share"] == 1.0 else 0)
        assert row["problems"] == 4
        assert row["low"] <= row["correct"] / 4 < row["high"]
