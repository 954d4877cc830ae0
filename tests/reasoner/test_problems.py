"""Owns the tests of the generated problems, against an independent solver."""

import hashlib
import re

import pytest

from reasoner.batches import make_batch
from reasoner.curriculum import FIRST_TRAINING_SEED
from reasoner.evaluate import Task
from reasoner.problems import (
    FAMILIES,
    HELD_OUT_TEMPLATES,
    TEMPLATES,
    extract_answer,
    generate,
    held_out,
    is_correct,
)
from reasoner.tokenizer import ASSISTANT, EOS, UNK, chat_prompt, encode, vocabulary
from support.second_solver import solve

SIZES = (1, 2, 3, 5, 8, 20, 75, 120)
PROGRAMS = ("recall", "copy", "hot", "sub")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lines", SIZES)
def test_answers_agree_with_an_independent_solver(family, lines):
    for seed in range(30):
        problem = generate(family, lines, seed)
        assert solve(family, problem.prompt) == problem.answer
        assert problem.trace.endswith(problem.answer)


@pytest.mark.parametrize("family", PROGRAMS)
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
    traces = {len(encode(problem.trace)) for problem in problems}
    assert len(traces) > 6 if family == "path" else len(traces) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_changes_the_marks_and_nothing_else(family):
    first = generate(family, 12, 3)
    for index, (end, ask) in enumerate(TEMPLATES):
        problem = generate(family, 12, 3, index)
        assert (problem.trace, problem.answer) == (first.trace, first.answer)
        assert len(encode(problem.prompt)) == len(encode(first.prompt))
        back = problem.prompt.replace(end, ";").replace(ask, "?")
        assert back == first.prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_held_out_problems_never_overlap(family):
    """By hash of the prompt's tokens: training batches against the report's tasks."""
    lines = 6

    def digests(prompts):
        return {hashlib.sha256(str(ids).encode()).digest() for ids in prompts}

    trained = set()
    for first in range(20):
        ids, _ = make_batch(family, lines, 5000, FIRST_TRAINING_SEED + 5000 * first)
        cut = [row[: row.index(vocabulary()[ASSISTANT])] for row in ids.tolist()]
        trained |= digests(cut)
    template = HELD_OUT_TEMPLATES[0]
    tasks = [Task(family, lines), Task(family, lines, template)]
    problems = [problem for task in tasks for problem in task.problems(100, 0)]
    assert all(held_out(problem) for problem in problems)
    cut = [encode(chat_prompt(problem.prompt))[:-2] for problem in problems]
    evaluated = digests(cut)
    assert len(evaluated) == 200
    assert len(trained) >= 300
    assert not trained & evaluated


def test_one_problem_in_eight_is_held_out():
    share = sum(held_out(generate("copy", 8, seed)) for seed in range(4000)) / 4000
    assert 0.1 < share < 0.15


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
