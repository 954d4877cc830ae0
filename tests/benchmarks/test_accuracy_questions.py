"""Tests of tasks: generated problems, long prompts, and files of made-up rows."""

import json
from pathlib import Path

import pytest

from benchmarks.accuracy import datasets, ruler
from benchmarks.accuracy.questions import BOX_PLEASE, check_task, questions_of
from benchmarks.accuracy.scoring import judge
from reasoner.problems import FAMILIES, generate, held_out
from reasoner.tokenizer import encode

DATA = Path(__file__).parent / "data"
ANSWERS = {
    "math500": ["12x", "\\frac{1}{4}", "0, 9", "\\frac{1}{36}", "75^\\circ"],
    "aime24": ["057", "024", "012", "120", "234"],
    "aime25": ["12", "68", "15", "35", "36"],
    "gsm8k": ["43", "28", "60", "2,250", "5"],
    "umath": ["3x^2-2", "8", "2", "e"],
}


@pytest.mark.parametrize("task", ANSWERS)
def test_files_of_each_format(task):
    questions = questions_of(task, 100, 0, DATA)
    assert [q.answers for q in questions] == [(answer,) for answer in ANSWERS[task]]
    assert len({q.id for q in questions}) == len({q.digest for q in questions})
    assert all(q.prompt.endswith(BOX_PLEASE) for q in questions)
    for question in questions:
        text = f"so it is \\boxed{{{question.answers[0]}}}"
        assert judge(question, text, True).correct
        assert not judge(question, text + ", no, \\boxed{-99}", True).correct
    assert questions_of(task, 2, 7, DATA) == questions[:2]


def test_a_long_text_comes_before_its_question():
    first, *_ = questions_of("longbench-notes", 5, 0, DATA)
    assert first.prompt.startswith("The ferry") and first.prompt.endswith("called?")
    assert first.answers == ("Petrel", "the Petrel")
    assert judge(first, "It is the Petrel.", True).correct


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"problem": "p"}', "expected the key answer or Answer, got none"),
        ('{"problem": "p", "answer": " "}', "expected an answer, got ' '"),
        ('{"problem": "p"', "expected a JSON object, Expecting"),
    ],
)
def test_rows_of_another_format_are_refused(tmp_path, row, message):
    good = json.dumps({"problem": "p", "answer": 1})
    (tmp_path / "aime24.jsonl").write_text(f"{good}\n{row}\n")
    with pytest.raises(ValueError, match=f"aime24.jsonl:2: {message}"):
        datasets.read("aime24", tmp_path)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_worked_answers_are_right_and_fit(family):
    for question in questions_of(f"{family}:6", 3, 11, DATA):
        problem = generate(family, 6, int(question.id))
        assert judge(question, problem.completion, True).correct
        assert not judge(question, problem.trace, True).correct
        tokens = len(encode(problem.completion))
        assert question.expected_tokens == tokens < question.max_tokens - 1


def test_problems_are_those_that_training_never_saw():
    seeds = [s for s in range(11, 99) if held_out(generate("copy", 6, s))]
    questions = questions_of("copy:6", 5, 11, DATA)
    assert [q.id for q in questions] == [str(s) for s in seeds[:5]]
    assert questions_of("copy:6", 4, int(questions[0].id) + 1, DATA) == questions[1:]


@pytest.mark.parametrize("name", ruler.GENERATORS)
def test_long_prompts(name):
    words = 300
    prompt, answers = ruler.GENERATORS[name](words, 3)
    assert (prompt, answers) == ruler.GENERATORS[name](words, 3)
    assert prompt != ruler.GENERATORS[name](words, 4)[0]
    assert words <= len(prompt.split()) < words + 200
    assert len(set(answers)) == len(answers)
    text, _, asked = prompt.rpartition("\n\n")
    assert all(answer in text and answer not in asked for answer in answers)
    (question,) = questions_of(f"{name}:{words}", 1, 3, DATA)
    assert judge(question, " ".join(answers), True).correct
    assert not judge(question, " ".join(answers[1:]), True).correct


def test_chains_of_variables_can_be_followed():
    for seed in range(20):
        prompt, answers = ruler.variables(400, seed)
        values: dict[str, str] = {}
        for sentence in prompt.split("Let ")[1:]:
            name, _, source = sentence.partition(". ")[0].partition(" be ")
            source = source.split(".")[0]
            values[name] = values.get(source.removeprefix("the value of "), source)
        asked = prompt.rpartition(" ")[2].rstrip(".")
        assert len(values) == ruler.CHAINS * (ruler.HOPS + 1)
        found = {name for name, value in values.items() if value == asked}
        assert found == set(answers) and len(found) == ruler.HOPS + 1


@pytest.mark.parametrize("task", ["copy", "copy:x", "nothing:5", "gsm8k:5"])
def test_unknown_tasks_are_refused(task):
    with pytest.raises(ValueError, match="task: expected NAME:SIZE with a name of"):
        check_task(task)
