"""Tests of the client: events of a stream, forced lengths, sampling."""

import asyncio
import time

import pytest

from benchmarks import load
from benchmarks.load import LoadError, parse_event, run_one_by_one, run_together
from support.servers.fake_server import MAX_TOKENS, FakeServer, serve


@pytest.mark.parametrize(
    "line, expected",
    [
        (b'data: {"choices": []}\n', {"choices": []}),
        (b'data:{"choices": []}\r\n', {"choices": []}),
        (b"\n", None),
        (b"", None),
        (b": keep alive\n", None),
        (b"event: message\n", None),
        (b"data: [DONE]\n", None),
    ],
)
def test_parse_event(line, expected):
    assert parse_event(line) == expected


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


def test_per_request_arguments_are_sent():
    fake = FakeServer()
    with serve(fake) as url:
        found = asyncio.run(run_one_by_one(url, [[1], [2]], 2, {"kv_policy": "none"}))
    assert found == [[7, 8], [7, 8]]
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


def test_a_failing_sample_is_not_swallowed(monkeypatch):
    monkeypatch.setattr(load, "SAMPLE_SECONDS", 0.001)

    def fail() -> dict[str, float]:
        raise OSError("no metrics")

    with serve(FakeServer()) as url, pytest.raises(LoadError, match="no metrics"):
        asyncio.run(run_together(url, [[1]], 500, fail))
