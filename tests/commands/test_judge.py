"""What verify makes of answers and counters that are right, wrong, or say nothing."""

from collections.abc import Iterator

import pytest

from vllm_kvpolicy.commands import judge
from vllm_kvpolicy.commands.judge import FAILED, PASSED, Answer, Check

STOCK = [Answer((1, 2, 3, 4)), Answer((5, 6, 7, 8))]
OTHER = [Answer((1, 2, 3, 4)), Answer((5, 6, 9, 8))]


@pytest.mark.parametrize(
    ("found", "place"),
    [
        ([[1, 2], [3, 4]], None),
        ([[1, 2], [3, 5]], (1, 1)),
        ([[1, 2], [3]], (1, 1)),
        ([[1, 2, 9], [3, 4]], (0, 2)),
        ([[0, 2], [3, 5]], (0, 0)),
    ],
)
def test_the_first_difference(found, place):
    assert judge.first_difference([[1, 2], [3, 4]], found) == place


@pytest.mark.parametrize(
    ("found", "events", "has_events", "result", "told"),
    [
        (STOCK, 3, True, PASSED, "2 requests, 8 tokens, 3 events"),
        (STOCK, 0, False, PASSED, "2 requests, 8 tokens, 0 events"),
        (OTHER, 3, True, FAILED, "request 1 differs from output token 2 on"),
        # Equal tokens say nothing where nothing has been moved.
        (STOCK, 0, True, FAILED, "0 events, expected some"),
        (STOCK, 1, False, FAILED, "1 events, expected none"),
    ],
)
def test_tokens(found, events, has_events, result, told):
    grown = {"events": float(events)}
    check = judge.same_tokens("x", STOCK, found, grown, has_events=has_events)
    assert check.result == result and told in check.figures


@pytest.mark.parametrize("name", ["events", "tokens_dropped", "blocks_returned", None])
def test_a_policy_that_returns_nothing(name):
    grown = {"events": 2.0, "tokens_dropped": 64.0, "blocks_returned": 2.0}
    check = judge.memory_returns({**grown, **({name: 0.0} if name else {})})
    assert check.result == (FAILED if name else PASSED)


@pytest.mark.parametrize(
    ("events", "counted", "result"),
    [
        ((1, 2), {"requests": 2.0, "events": 3.0}, PASSED),
        ((1, 2), {"requests": 2.0, "events": 4.0}, FAILED),
        ((1, 2), {"requests": 3.0, "events": 3.0}, FAILED),
        # An answer that does not say: events cannot be compared, requests can.
        ((1, None), {"requests": 2.0, "events": 4.0}, PASSED),
        ((1, None), {"requests": 1.0, "events": 4.0}, FAILED),
    ],
)
def test_counters(events, counted, result):
    answers = [Answer((), each) for each in events]
    assert judge.counters_agree("x", answers, counted).result == result


def test_what_stops_is_a_failed_check() -> None:
    def checks() -> Iterator[Check]:
        yield Check("x", PASSED, "")
        raise RuntimeError("no kernel\nimage")

    first, last = judge.until_stopped("the engine answers", checks())
    assert first.result == PASSED
    told = "RuntimeError: no kernel image"
    assert last == Check("the engine answers", FAILED, told)
