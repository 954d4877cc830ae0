"""Owns the tests of the generated problems, against an independent solver."""

import random
import re

import pytest

from reasoner.curriculum import (
    FIRST_TRAINING_SEED,
    LARGEST,
    Ladder,
    Progress,
    pick_size,
)
from reasoner.evaluate import CacheRule, wilson
from reasoner.problems import (
    FAMILIES,
    NAMES,
    Problem,
    extract_answer,
    generate,
    is_correct,
)
from reasoner.tokenizer import EOS, UNK, chat_prompt, encode, vocabulary
from reasoner.train import make_batch, spread_positions

SIZES = (1, 2, 3, 5, 8, 20, 75)


def solve(prompt: str) -> str:
    """Executes a prompt line by line, with no code shared with the generators."""
    values: dict[str, int] = {}
    answer = ""
    for line in re.findall(r"[^;?]+;|\?[a-z]{2}", prompt):
        if line.startswith("?"):
            answer = str(values[line[1:]])
            continue
        expression, name = line.rstrip(";").split(">")
        terms = [values[t] if t in values else int(t) for t in expression.split("-")]
        assert name not in values, "a name was stored twice"
        values[name] = (terms[0] - sum(terms[1:])) % 10
    return answer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lines", SIZES)
def test_answers_agree_with_an_independent_solver(family, lines):
    for seed in range(30):
        problem = generate(family, lines, seed)
        assert solve(problem.prompt) == problem.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_trace_is_the_prompt_with_values_after_upper_case_names(family):
    for seed in range(20):
        problem = generate(family, 30, seed)
        named = re.sub(r"([A-Z]{2})\d", lambda hit: hit[1].lower(), problem.trace)
        assert named == problem.prompt
        shown = re.findall(r"([A-Z]{2})(\d)", problem.trace)
        assert len(set(shown)) == len(dict(shown)), "a name has two values"
        assert shown[-1][1] == problem.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_same_arguments_same_problem_and_equal_lengths(family):
    problems = [generate(family, 24, seed) for seed in range(40)]
    assert problems == [generate(family, 24, seed) for seed in range(40)]
    assert len({problem.prompt for problem in problems}) == 40
    assert len({len(encode(problem.prompt)) for problem in problems}) == 1
    assert len({len(encode(problem.trace)) for problem in problems}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_not_guessable(family):
    answers = [generate(family, 40, seed).answer for seed in range(400)]
    assert max(answers.count(digit) for digit in set(answers)) < 400 * 0.2


def test_copy_needs_facts_hundreds_of_tokens_back():
    """The value asked for is mostly older than a window of 124 tokens."""
    far = 0
    for seed in range(100):
        problem = generate("copy", 110, seed)
        tokens = problem.trace.rpartition("?")[0]
        asked = problem.trace.rpartition("?")[2][:2]
        distance = len(encode(tokens[tokens.rindex(asked) :]))
        far += distance > 124
    assert far >= 60


@pytest.mark.parametrize(
    ("family", "lines"), [("copy", 0), ("copy", 121), ("recall", 242), ("nope", 3)]
)
def test_bad_arguments_are_refused(family, lines):
    with pytest.raises(ValueError, match="expected"):
        generate(family, lines, 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"trace</think>\boxed{7}", "7"),
        (r"\boxed{1} and then \boxed{ 2 }", "2"),
        ("7", None),
        (r"\boxed{7", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_is_correct_accepts_the_worked_completion_and_nothing_else():
    problem = generate("sub", 12, 3)
    wrong = (int(problem.answer) + 1) % 10
    assert is_correct(problem, problem.completion)
    assert not is_correct(problem, problem.completion + rf"\boxed{{{wrong}}}")
    assert not is_correct(problem, problem.trace)


def test_no_problem_contains_an_unknown_token():
    unknown = vocabulary()[UNK]
    for family in FAMILIES:
        problem = generate(family, 60, 1)
        text = chat_prompt(problem.prompt) + problem.completion + EOS
        assert unknown not in encode(text)


def test_names_are_unique_and_not_ambiguous():
    assert len(set(NAMES)) == len(NAMES) == 120
    assert all(len(encode(a + b)) == 2 for a in NAMES[:9] for b in NAMES)


def test_batches_use_training_seeds_and_mask_the_prompt():
    ids, prompt_tokens = make_batch("copy", 9, 1000, FIRST_TRAINING_SEED)
    first: Problem = generate("copy", 9, FIRST_TRAINING_SEED)
    assert ids.shape[0] * ids.shape[1] <= 1000 < (ids.shape[0] + 1) * ids.shape[1]
    assert ids[0, :prompt_tokens].tolist() == encode(chat_prompt(first.prompt))
    assert ids[0, prompt_tokens:].tolist() == encode(first.completion + EOS)


def test_ladder_grows_only_when_the_present_size_is_solved():
    ladder = Ladder(lines=10)
    for _ in range(20):
        ladder.record(10, 0.5, 100, 0.9)
        ladder.record(3, 1.0, 100, 0.9)
    assert ladder.lines == 10
    for _ in range(100):
        ladder.record(10, 1.0, 12, 0.9)
    assert ladder.lines == 12


def test_sizes_stay_within_the_curriculum():
    progress, rng = Progress(), random.Random(0)
    progress.ladders["sub"].lines = 20
    drawn = [pick_size(rng, progress) for _ in range(2000)]
    assert {family for family, _ in drawn} == set(LARGEST)
    assert max(lines for family, lines in drawn if family == "sub") == 20
    assert max(lines for family, lines in drawn if family == "copy") == 4


def test_spread_positions_ascend_and_leave_the_prompt_alone():
    ids, prompt_tokens = make_batch("copy", 12, 4000, FIRST_TRAINING_SEED)
    positions = spread_positions(ids, seed=1)
    steps = positions.diff(dim=1)
    assert steps.min() == 1
    assert (steps[:, : prompt_tokens - 2] == 1).all()
    assert positions.max() <= 1300
    gapped = (steps > 1).any(1).float().mean()
    assert 0.2 < gapped < 0.6
    assert steps.max() > 100


def test_streaming_mask_keeps_sinks_and_recent_tokens():
    mask = CacheRule(recent=3, sinks=2).mask(2, 10, 6)
    assert mask.shape == (2, 1, 1, 10)
    assert mask[1, 0, 0].nonzero().flatten().tolist() == [0, 1, 7, 8, 9]
    kept = CacheRule(recent=3, keep_prompt=True).mask(1, 10, 6)
    assert kept[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert CacheRule().mask(1, 10, 6) is None


def test_wilson_interval_matches_published_values():
    low, high = wilson(81, 100)
    assert (round(low, 3), round(high, 3)) == (0.722, 0.875)
    assert wilson(0, 10)[0] == 0.0
    with pytest.raises(ValueError, match="correct"):
        wilson(3, 2)
