"""Tests of the accuracy client against a server that fails, stalls and cuts off."""

import asyncio
import re

import pytest

from benchmarks.accuracy.client import Asked, Client
from benchmarks.accuracy.questions import EXACT, Question
from benchmarks.load import LoadError
from support.servers.chat_server import ChatServer, serve

PATIENT = Client(timeout=5.0, tries=4, pause=0.01)
PASSING = [500, 429, "reset", "bad_json", "cut_body", "no_choices", "aborted"]


def asked(prompt: str, answer: str | None = None, sample: int = 0) -> Asked:
    """Return a request whose right answer is its prompt, unless another is given."""
    right = (prompt if answer is None else answer,)
    question = Question("task", prompt, prompt, right, EXACT, 10, 50)
    return Asked({"id": prompt, "sample": sample}, question, sample, None)


def ask(fake: ChatServer, wanted: list[Asked], client: Client = PATIENT):
    lines: list[dict] = []
    with serve(fake) as url:
        failures = asyncio.run(client.ask_all(url, wanted, lines.append))
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}, failures


def test_an_answer_becomes_a_line():
    fake = ChatServer(answers={"5": "three threes, \\boxed{5}"})
    lines, failures = ask(fake, [asked("5"), asked("6", answer="7")])
    assert failures == []
    right, wrong = lines["5"], lines["6"]
    assert right.pop("seconds") > 0
    line = {"id": "5", "sample": 0, "correct": True, "score": 1.0, "answer": "5"}
    line |= {"prompt_tokens": 40, "output_tokens": 23, "capped": False, "tries": 1}
    line |= {"repeated": {"4": 0.1, "8": 0.0, "20": 0.0}, "dropped": None}
    assert right == line | {"expected": ["5"], "text": "three threes, \\boxed{5}"}
    assert (wrong["correct"], wrong["answer"], wrong["score"]) == (False, "6", 0.0)


def test_what_an_answer_says_of_its_events_is_in_its_line():
    said = {"kv_policy": {"dropped": [[100, 32, 96], [164, 48 + 1 / 3, 96]]}}
    fake = ChatServer(says={"5": said, "6": {"connector": 1}})
    lines, _ = ask(fake, [asked("5"), asked("6"), asked("7")])
    assert lines["5"]["dropped"] == [[100, 32], [164, 48.333]]
    assert lines["6"]["dropped"] is lines["7"]["dropped"] is None


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_tried_again(fault):
    fake = ChatServer({"5": [fault, fault]})
    lines, failures = ask(fake, [asked("5"), asked("6")])
    assert failures == []
    assert lines["5"]["correct"] and lines["5"]["tries"] == 3
    assert lines["6"]["tries"] == 1
    assert fake.tries == {"5": 3, "6": 1}


@pytest.mark.parametrize(
    ("faults", "tries", "told"),
    [
        ([500] * 9, PATIENT.tries, "task 5: .*, 4 times"),
        ([400], 1, "task 5: HTTP 400: fault 400"),  # a refusal is not tried again
    ],
)
def test_what_does_not_pass_is_no_answer(faults, tries, told):
    fake = ChatServer({"5": faults})
    lines, (failure,) = ask(fake, [asked("5"), asked("6")])
    assert list(lines) == ["6"] and re.fullmatch(told, failure)
    assert fake.tries["5"] == tries


def test_a_server_that_stalls_is_left():
    hasty = Client(timeout=0.3, tries=2, pause=0.01)
    fake = ChatServer({"5": ["stall"], "6": ["stall", "stall"]})
    lines, failures = ask(fake, [asked("5"), asked("6")], hasty)
    assert lines["5"]["tries"] == 2 and lines["5"]["correct"]
    assert failures == ["task 6: no answer within 0.3 s, 2 times"]


def test_an_answer_that_was_cut_off_is_wrong():
    fake = ChatServer({"5": ["capped"]})
    lines, _ = ask(fake, [asked("5")])
    assert lines["5"]["text"] == "\\boxed{5}"
    assert lines["5"]["capped"] and not lines["5"]["correct"]
    assert lines["5"]["answer"] is None and lines["5"]["score"] == 0.0


def test_no_more_than_so_many_at_once():
    fake = ChatServer()
    wanted = [asked(str(number)) for number in range(30)]
    lines, _ = ask(fake, wanted, Client(concurrency=3))
    assert len(lines) == 30 and fake.most_at_once == 3


def test_too_many_failures_end_the_run():
    prompts = [str(number) for number in range(50)]
    fake = ChatServer(dict.fromkeys(prompts, [400]))
    client = Client(concurrency=2, max_failures=5)
    with pytest.raises(LoadError, match="[67] problems failed, at most 5 may"):
        ask(fake, [asked(prompt) for prompt in prompts], client)
    assert len(fake.bodies) <= 7


def test_requests_are_the_same_every_time():
    first, second = asked("5"), asked("5", sample=1)
    client = Client(temperature=0.6, max_tokens=9, model="m")
    assert client.body(first) == client.body(first)
    assert client.body(first)["seed"] != client.body(second)["seed"]
    body = client.body(first)
    assert 0 <= body.pop("seed") < 2**31
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "5"}],
        "temperature": 0.6,
        "max_tokens": 9,
        "return_token_ids": True,
    }
    assert Client().body(first)["max_tokens"] == 50
