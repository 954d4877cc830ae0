"""Tests of the language benchmark's retrieval and few-shot tasks."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.servers import FULL
from benchmarks.language import choose, losses, parts, tasks
from benchmarks.language.task_makers import MAKERS, SHOWN
from benchmarks.language.tasks import Answered, problems
from benchmarks.language.texts import Text
from support.language_model import FIRST, NEWLINE, MadeUpAsker, Words

LENGTH = 1024
WORDS = Words()
RIGHT, WRONG = math.log(0.7), math.log(0.2)


def made_texts() -> list[Text]:
    """Return three books of random words in lines of eight, and a guide."""
    rng = random.Random(0)
    found = []
    for number, kind in enumerate(("novel", "play", "verse", "guide")):
        lines = (
            " ".join(f"w{rng.randrange(5000)}" for _ in range(8)) for _ in range(240)
        )
        ids = WORDS.encode("\n".join(lines))
        found.append(Text(f"{kind}-{number}", kind, (FIRST, *ids)))
    return found


TEXTS = made_texts()


def made(task: str, count: int = 3, seed: int = 5) -> list[tasks.Problem]:
    """Return problems of a task."""
    return problems(task, LENGTH, count, seed, WORDS.encode, TEXTS)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_texts_have_their_length_and_problems_repeat(task):
    found = made(task)
    assert [len(one.text_ids) for one in found] == [LENGTH] * 3
    assert all(one.text_ids[0] == FIRST for one in found)
    assert found == made(task)
    assert found[:2] == made(task, 2)
    assert len({one.digest for one in [*found, *made(task, seed=6)]}) == 6
    assert [one.id for one in found] == [f"{task}-{LENGTH}-{n}" for n in (1, 2, 3)]


def asked_of(problem: tasks.Problem) -> list[tuple[str, str]]:
    """Return the words of questions and answers."""
    return [
        (WORDS.decode(one).strip(), WORDS.decode(two)) for one, two in problem.asked
    ]


@pytest.mark.parametrize("task", sorted(set(tasks.TASKS) - {"labels"}))
def test_the_text_has_each_answer_behind_the_words_of_its_question(task):
    for problem in made(task):
        text = WORDS.decode(problem.text_ids)
        asked = asked_of(problem)
        assert len(asked) == len(set(asked)) >= 3
        assert all(f"\n{begun}{answer}" in text for begun, answer in asked)


def test_only_the_asked_lines_begin_like_the_question():
    for task in ("keys", "lookup", "facts", "lists"):
        for problem in made(task):
            text = WORDS.decode(problem.text_ids)
            for begun, _ in asked_of(problem):
                assert text.count(f"\n{begun}") == SHOWN


def test_labels_are_asked_for_words_that_were_not_shown_one_of_each_class():
    for seed in range(5):
        hidden = MAKERS["labels"](random.Random(seed))
        shown = [line.split(" ->") for line in hidden.lines]
        assert {begun.removesuffix(" ->") for begun, _ in hidden.asked}.isdisjoint(
            word for word, _ in shown
        )
        counts = Counter(label for _, label in shown)
        assert counts == dict.fromkeys((label for _, label in hidden.asked), 20)


def test_lines_stand_between_lines_of_the_text():
    (problem,) = made("keys", 1)
    ids = list(problem.text_ids)
    for question, answer in problem.asked * SHOWN:
        line = [*question[2:], *answer, *WORDS.encode(".")]
        places = range(len(ids))
        place = next(n for n in places if ids[n : n + len(line)] == line)
        around = ids[place - 2 : place], ids[place + len(line) : place + len(line) + 2]
        assert around == ([NEWLINE] * 2, [NEWLINE] * 2)
        del ids[place - 1 : place + len(line) + 2]
    assert ids in [filler[: len(ids)] for filler in fillers()]


def fillers() -> list[list[int]]:
    """Return the texts of which problems are made."""
    books = [list(text.token_ids[1 : tasks.PIECE]) for text in TEXTS[:3]]
    return [[FIRST, *sum(books[n:] + books[:n], [])] for n in range(3)]


def test_guides_and_sources_are_not_used():
    most = 3 * (tasks.PIECE - 1) + 1
    with pytest.raises(ValueError, match=f"length: got 8192, expected at most {most}"):
        problems("passage", 8192, 1, 0, WORDS.encode, TEXTS)


def test_problems_are_the_same_for_longer_texts_and_need_long_ones():
    short, shorter = (
        [replace(text, token_ids=text.token_ids[:length]) for text in TEXTS]
        for length in (tasks.PIECE, tasks.PIECE - 1)
    )
    assert problems("keys", 2048, 2, 5, WORDS.encode, short) == problems(
        "keys", 2048, 2, 5, WORDS.encode, TEXTS
    )
    with pytest.raises(ValueError, match="text-tokens: got 2047, expected at least"):
        problems("keys", 2048, 2, 5, WORDS.encode, shorter)


def test_an_answer_is_right_if_no_token_of_it_has_a_better_one():
    (problem,) = made("passage", 1)
    whole = problem.token_ids
    count = len(problem.asked[-1][1])

    def predict(policy, budget, before):
        own = whole[len(before)] if len(before) < len(whole) else FIRST
        is_answer = len(before) in answer_places(problem)
        if policy == "wrong" and len(before) == len(whole) - 3:
            return {own: WRONG, own + 1: RIGHT}
        if policy == "level" and is_answer:
            return {own: WRONG, own + 1: WRONG}
        # What is predicted outside of answers does not count.
        return {own: RIGHT if is_answer else 2 * WRONG, own + 1: WRONG}

    asker = MadeUpAsker(predict)
    last = -((count - 1) * RIGHT + WRONG) / count
    for policy, right, loss in (
        ("good", [1, 1, 1], [-RIGHT] * 3),
        ("level", [1, 1, 1], [-WRONG] * 3),
        ("wrong", [1, 1, 0], [-RIGHT, -RIGHT, last]),
    ):
        (found,) = tasks.measure(asker, policy, 256, [problem])
        assert found.is_right.tolist() == right
        assert found.losses.tolist() == pytest.approx(loss)
        kept = tasks.figures(found, 256, 256)
        assert kept["right"] == pytest.approx(np.mean(right), abs=1e-4)
        assert kept["loss"] == pytest.approx(np.mean(loss), abs=1e-4)
    assert asker.asked[-1] == ("wrong", 256, 1)


def answer_places(problem: tasks.Problem) -> set[int]:
    """Return the positions of all answers' tokens."""
    place, found = len(problem.text_ids), set()
    for question, answer in problem.asked:
        place += len(question)
        found |= set(range(place, place + len(answer)))
        place += len(answer)
    return found


@pytest.mark.parametrize(
    ("length", "asked", "budget", "interval", "sentence"),
    [
        (1000, 20, 256, 256, "length: got 1000, expected a multiple of the interval"),
        (1024, 20, 1024, 256, "at least 1280, the first event"),
        (1024, 130, 256, 128, "interval: got 128, expected at least 130"),
    ],
)
def test_an_event_has_to_come_right_before_the_question_and_none_after(
    length, asked, budget, interval, sentence
):
    found = Answered(length, asked, np.ones(4), np.ones(4, bool))
    with pytest.raises(ValueError, match=sentence):
        tasks.figures(found, budget, interval)


def test_a_task_is_chosen_if_it_is_solved_with_its_text_and_not_without():
    def predict(policy, budget, before):
        assert policy == FULL
        own = RIGHT if len(before) > LENGTH else WRONG
        return defaultdict(lambda: own, {-1: math.log(0.5)})

    row = choose.shares(MadeUpAsker(predict), made("facts", 5))
    assert (row["right"], row["right_without"]) == (1, 0)
    assert (row["loss"], row["loss_without"]) == (0.36, 1.61)
    assert choose.is_solved(row)
    assert not choose.is_solved(row | {"right": 0.75})
    assert not choose.is_solved(row | {"right_without": 0.15})


def test_the_chosen_tasks_are_a_part_with_other_problems_than_the_selection():
    found = parts.PARTS["tasks"].items(WORDS.encode, TEXTS * 40, 2)
    lengths = [(task, n) for task, all_of in tasks.CHOSEN.items() for n in all_of]
    assert lengths
    assert [one.kind for one in found[::2]] == [f"{t}-{n}" for t, n in lengths]
    assert len({one.id for one in found}) == len(found) == 2 * len(lengths)
    task, length = lengths[0]
    selection = problems(
        task, length, 2, tasks.SELECTION_SEED, WORDS.encode, TEXTS * 40
    )
    assert not {one.digest for one in found} & {one.digest for one in selection}


def test_losses_are_those_of_the_prompts_tokens():
    text = Text("novel-1", "novel", (FIRST, 7, 8, 9))
    asker = MadeUpAsker(lambda policy, budget, before: {7: -1.0, 8: -2.0, 9: -3.0})
    (found,) = losses.measure(asker, "tova", 256, [text])
    assert found.tolist() == [1.0, 2.0, 3.0]
