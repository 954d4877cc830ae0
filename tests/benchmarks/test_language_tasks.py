"""Tests of the language benchmark's retrieval and few-shot tasks."""

import math
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.language import tasks
from benchmarks.language.task_makers import ASKED, MAKERS, VOTES
from benchmarks.language.tasks import Answered, problems
from benchmarks.language.texts import Text
from support.language_model import FIRST, MadeUpAsker, Words

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
    return problems(task, LENGTH, count, seed, WORDS.encode, TEXTS)


@pytest.mark.parametrize("task", MAKERS)
def test_texts_have_their_length_and_each_answer_behind_its_question(task):
    found = made(task)
    assert [len(one.text_ids) for one in found] == [LENGTH] * 3
    assert all(one.text_ids[0] == FIRST for one in found)
    assert found == made(task)
    assert found[:2] == made(task, 2)
    assert len({one.digest for one in [*found, *made(task, seed=6)]}) == 6
    assert [one.id for one in found] == [f"{task}-{LENGTH}-{n}" for n in (1, 2, 3)]
    for problem in found:
        text = WORDS.decode(problem.text_ids)
        asked = {
            (WORDS.decode(one).strip(), WORDS.decode(two)) for one, two in problem.asked
        }
        assert len(asked) == ASKED
        if task == "votes":
            pattern = r"(\w+) votes for the (\w+)\."
            counted = Counter(re.findall(pattern, text))
            assert sorted(counted.values()) == [1] * ASKED + [VOTES] * ASKED
            assert asked == {
                (f"Most votes of {one} are for the", f" {two}")
                for (one, two), count in counted.items()
                if count == VOTES
            }
        else:
            assert all(f"\n{begun}{answer}" in text for begun, answer in asked)


def test_an_answer_is_right_if_no_token_of_it_has_a_better_one():
    (problem,) = made("mapping", 1)
    ids = problem.text_ids
    asked = tuple((ids[at : at + 4], ids[at + 4 : at + 16]) for at in (100, 200, 300))
    problem = replace(problem, asked=asked)
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
    asker.dropped = [[len(problem.text_ids), 200.0, 56]]
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
        # What each token behind the text reads, but for the last, which asks no more.
        read = np.arange(len(problem.text_ids) + 1, len(whole))
        share = (read - 200).sum() / read.sum()
        assert kept["held"] == pytest.approx(share, abs=1e-4)
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
