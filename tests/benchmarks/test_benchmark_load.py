"""Tests of the client: events of a stream, forced lengths, sampling."""

import asyncio
import time

import pytest

from benchmarks import load
from benchmarks.load import (
    LoadError,
    parse_event,
    run_conversations,
    run_one_by_one,
    run_together,
)
from support.servers.fake_server import MAX_TOKENS, FakeServer, serve


def test_parse_event_raises_what_the_server_reports():
    with pytest.raises(LoadError, match="pool is gone"):
        parse_event(b'data: {"error": {"message": "the pool is gone"}}\n')


def test_outputs_and_arrivals():
    fake = FakeServer()
    with serve(fake) as url:
        completions, _ = asyncio.run(run_together(url, [[1], [2, 3]], 5, dict))
    for completion in completions:
        assert completion.token_ids == [7, 8, 9, 10, 11]
        times = [completion.started, *completion.arrivals]
        assert times == sorted(times) and len(times) == 6
        assert completion.arrivals[-1] <= time.perf_counter()
    assert sorted(body["prompt"] for body in fake.bodies) == [[1], [2, 3]]
    for body in fake.bodies:
        assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0
        assert body["min_tokens"] == body["max_tokens"] == 5
        assert "vllm_xargs" not in body


@pytest.mark.parametrize("at_once, most", [(None, 6), (2, 2), (1, 1)])
def test_so_many_are_in_flight(at_once, most):
    fake = FakeServer()
    prompts = [[number] for number in range(6)]
    with serve(fake) as url:
        completions, _ = asyncio.run(run_together(url, prompts, 40, dict, at_once))
    assert len(completions) == 6 and fake.most_at_once <= most
    # A request that waits for its place has not been sent yet.
    starts = [completion.started for completion in completions]
    ends = sorted(completion.arrivals[-1] for completion in completions)
    assert starts == sorted(starts)
    assert starts[most - 1] < ends[0]
    assert all(starts[n] > ends[n - most] for n in range(most, 6))


def test_a_conversation_goes_on_without_its_thinking():
    fake = FakeServer()
    messages = [[1, 2, 3], [4], [5, 6]]
    with serve(fake) as url:
        found, _ = asyncio.run(
            run_conversations(url, [messages], 5, 3, dict, {"kv_policy": "none"})
        )
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert first == [1, 2, 3]
    # Answers are 7 to 11, of which 7 to 9 is the thinking.
    assert second == [1, 2, 3, 10, 11, 4]
    assert third == [1, 2, 3, 10, 11, 4, 10, 11, 5, 6]
    assert [completion.turn for completion in found] == [1, 2, 3]
    assert all(completion.token_ids == [7, 8, 9, 10, 11] for completion in found)
    assert all(body["vllm_xargs"] == {"kv_policy": "none"} for body in fake.bodies)


def test_a_short_output_is_an_error():
    with (
        serve(FakeServer(missing_tokens=1)) as url,
        pytest.raises(LoadError, match="forced 5 tokens, got 4"),
    ):
        asyncio.run(run_one_by_one(url, [[1]], 5))


def test_an_http_error_is_an_error():
    message = "HTTP 400: too many tokens"
    with serve(FakeServer()) as url, pytest.raises(LoadError, match=message):
        asyncio.run(run_one_by_one(url, [[1]], MAX_TOKENS + 1))


def test_samples_are_taken_while_requests_run(monkeypatch):
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.001)
    with serve(FakeServer()) as url:
        _, samples = asyncio.run(
            run_together(url, [[1]], 500, lambda: {"running": 1.0})
        )
    assert samples and samples[0] == {"running": 1.0}
