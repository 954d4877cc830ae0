"""A real `vllm serve` with a policy: chat, metrics, knobs of one request, hang-ups.

And what clients see of its prefix cache, and what `vllm-kvpolicy verify URL` says.
"""

import asyncio
import json
import random
import re
import time

import httpx
import openai
import pytest

from support import monitoring
from support.servers.servers import serving
from support.servers.shared_server import (
    BLOCK,
    BUDGET,
    HEADERS,
    INTERVAL,
    KEY,
    SETTINGS,
)
from support.servers.small_server import by_engine, num_events
from vllm_kvpolicy import __main__ as command

WINDOW = 32  # of AMS

pytestmark = pytest.mark.serve


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="1-api-server"),
        pytest.param(2, id="2-api-servers", marks=pytest.mark.slow),
    ],
)
def server(request, tiny_model, tmp_path_factory):
    """URL of the shared server, or of one without a live page that has two doors."""
    if request.param == 1:
        yield request.getfixturevalue("shared_server")
        return
    folder = tmp_path_factory.mktemp("doors")
    settings = folder / "serve.yaml"
    settings.write_text(SETTINGS)
    arguments = ["--config", str(settings), "--api-server-count", str(request.param)]
    with serving(tiny_model, arguments, folder) as url:
        yield url


def complete(url, **fields):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    content = json.dumps(body | fields)  # in ASCII, also half characters
    head = {"Content-Type": "application/json", **HEADERS}
    return httpx.post(
        f"{url}/v1/completions", content=content, headers=head, timeout=120
    )


def post(url, path, body):
    return httpx.post(f"{url}/v1/{path}", json=body, headers=HEADERS, timeout=120)


def metric(url, name):
    found = by_engine(url, name)
    assert found, f"{name} is not on /metrics"
    return found.total()


def wait_for_metric(url, name, value):
    deadline = time.monotonic() + 30
    while metric(url, name) != value and time.monotonic() < deadline:
        time.sleep(0.3)
    assert metric(url, name) == value


def test_one_long_answer_makes_events_and_returns_blocks(server):
    before = num_events(server)
    returned = metric(server, "kvpolicy_blocks_returned_total")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "count"}],
        "max_tokens": 500,
        "ignore_eos": True,
    }
    answer = post(server, "chat/completions", body)
    assert answer.status_code == 200, answer.text
    held = answer.json()["usage"]["total_tokens"]
    # From budget + interval on, every interval; the last token is not computed. The
    # request's phase moves them all by less than an interval.
    least = (held - 1 - BUDGET - INTERVAL - 1) // INTERVAL + 1
    events = num_events(server) - before
    assert events in (least, least + 1)
    # Any API server may answer, and each must know the same.
    for _ in range(6):
        assert num_events(server) - before == events
    assert metric(server, "kvpolicy_blocks_returned_total") - returned >= events
    wait_for_metric(server, "vllm:kv_cache_usage_perc", 0)


def test_dashboard_and_alerts_read_series_that_are_there(server):
    assert complete(server).status_code == 200
    text = httpx.get(f"{server}/metrics", timeout=30).text
    there = set(re.findall(r"^([a-z_:]+)\{", text, re.MULTILINE))
    assert monitoring.all_series() - there == set()


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"kv_budget": "many"}, ["kv_budget: got 'many'", "integer"]),
        ({"kv_budget": 60}, ["kv_budget: got 60", "at least 68"]),
        ({"kv_policy": "tova"}, ["'none'", "'ams-expected'", "'chunk-keydiff'"]),
        ({"kv_policy": ["streaming"]}, ["kv_policy: got ['streaming']"]),
        ({"kv_bugdet": 64}, ["'kv_bugdet'", "kv_budget"]),
        ({"kv_\ud800": 64}, ["'kv_\\ud800'", "kv_budget"]),
        ({"kv_sinks": "\ud800"}, ["kv_sinks: got '\\ud800'", "integer"]),
        ({"kv_pin": "all"}, ["kv_pin: got 'all'", "'system'", "a number of tokens"]),
        ({"kv_pin": "system"}, ["kv_pin: got 'system'", "no chat template"]),
        ({"kv_keep": [8]}, ["kv_keep: got [8]", "a list of first, end"]),
        ({"kv_keep_messages": [0]}, ["kv_keep with tokens", "only chats"]),
        ({"kv_policy_engine": "../x"}, ["'kv_policy_engine'", "kv_budget"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_knobs_are_client_errors(server, knobs, words, stream):
    answer = complete(server, vllm_xargs=knobs, stream=stream)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("pin", "tokens"),
    [("system", 8 + 150 + 1 + 6), ("prompt", 8 + 150 + 1 + 6 + 40 + 1 + 11), (70, 70)],
)
def test_a_chat_says_what_it_has_pinned(server, pin, tokens):
    """The template writes `system: ...`, a line of its own, and then `user: `."""
    body = {"model": "tiny", "max_tokens": 300, "ignore_eos": True}
    body |= {"vllm_xargs": {"kv_pin": pin}}
    system, user = "You are " + 71 * "it", "Why?" + 18 * "ab"
    body["messages"] = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
    ]
    answer = post(server, "chat/completions", body)
    assert answer.status_code == 200, answer.text
    said = answer.json()["kv_transfer_params"]["kv_policy"]
    assert said["pinned"] == tokens // BLOCK * BLOCK
    assert len(said["dropped"]) > 1


def test_messages_of_a_chat_stay_or_go_first(server):
    """The template writes `ROLE: ...`, a line for each message; tokens are letters."""
    said = {"user": "Why?" + 18 * "ab", "tool": 60 * "x", "system": "Be brief."}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    body = {"model": "tiny", "max_tokens": 200, "ignore_eos": True}
    body |= {"messages": messages, "vllm_xargs": {"kv_keep_messages": [2]}}
    body["vllm_xargs"] |= {"kv_drop_messages": [1], "kv_keep": [0, 6]}
    answer = post(server, "chat/completions", body)
    assert answer.status_code == 200, answer.text
    ends = [6 + 40, 6 + 40 + 1 + 6 + 60, 6 + 40 + 1 + 6 + 60 + 1 + 8 + 9]
    found = answer.json()["kv_transfer_params"]["kv_policy"]
    keep, drop = [0, 6, ends[2] - 9, ends[2]], [ends[1] - 60, ends[1]]
    assert found["hints"] == {"keep": keep, "drop_first": drop, "missed": []}
    assert found["dropped"]
    body["vllm_xargs"] = {"kv_keep_messages": [3]}
    answer = post(server, "chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert "kv_keep_messages: got [3], expected a list of" in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_bad_knobs_of_a_response_are_client_errors(server, stream):
    body = {"model": "tiny", "input": "hello", "max_output_tokens": 8}
    body |= {"stream": stream, "vllm_xargs": {"kv_budget": 60}}
    answer = post(server, "responses", body)
    assert answer.status_code == 400, answer.text
    assert "kv_budget: got 60, expected at least 68" in answer.text
    body["vllm_xargs"] = {"kv_budget": 72}
    answer = post(server, "responses", body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_beam_search_takes_no_knobs(server, path):
    body = {"model": "tiny", "max_tokens": 4, "use_beam_search": True, "n": 2}
    body |= {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    body["vllm_xargs"] = {"kv_policy": "none"}
    answer = post(server, path, body)
    assert answer.status_code == 400, answer.text
    assert "kv_policy: has no effect with use_beam_search" in answer.text


@pytest.mark.parametrize(
    "knobs",
    [
        {"kv_budget": 72},
        {"kv_policy": "none"},
        {"kv_policy": "chunk-keydiff"},
        {"kv_policy": "ams-expected"},
    ],
)
def test_good_knobs_are_served(server, knobs):
    before = num_events(server)
    answer = complete(server, vllm_xargs=knobs, max_tokens=200, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 200
    has_events = num_events(server) > before
    assert has_events == (knobs.get("kv_policy") != "none")


def test_hits_are_counted_and_salts_keep_requests_apart(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, timeout=300)

    def ask(prompt, **extra):
        before = metric(server, "vllm:prefix_cache_hits_total")
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=110,
            temperature=0,
            extra_body={"ignore_eos": True, **extra},
        )
        hits = metric(server, "vllm:prefix_cache_hits_total") - before
        details = answer.usage.prompt_tokens_details
        assert (details.cached_tokens if details else 0) == hits
        return answer.choices[0].text, int(hits)

    prompt = "".join(chr(97 + (7 * n + n // 9) % 26) for n in range(200))
    # An event ends the prompt of 200 and reads its last 32 queries.
    usable = (len(prompt) - WINDOW) // BLOCK * BLOCK
    cold, hits = ask(prompt)
    assert hits == 0
    assert ask(prompt) == (cold, usable)
    # A second turn finds the whole prompt of the first.
    assert ask(prompt + cold[:100])[1] == 192
    assert ask(prompt, cache_salt="mine") == (cold, 0)
    assert ask(prompt, cache_salt="mine") == (cold, usable)
    # Requests without the policy and with a smaller budget share all the same.
    assert ask(prompt, vllm_xargs={"kv_policy": "none"})[1] == 192
    assert ask(prompt, vllm_xargs={"kv_budget": 72})[1] == usable
    wait_for_metric(server, "vllm:kv_cache_usage_perc", 0)


def test_verify_finds_it_healthy(server, capsys):
    status = command.main(["verify", server, "--api-key", KEY])
    text = capsys.readouterr().out
    assert status == 0 and "healthy (" in text, text
    states = [line.split("  ")[0] for line in text.splitlines()]
    assert states.count("ok") == 5 and "open" not in states, text
    assert "events counted" in text and "vllm of the server  0.32" in text


async def stream_and_hang_up(client, url, seed, limit):
    """Read a random part of a stream; return whether it was read to its end."""
    rng = random.Random(seed)
    body = {"model": "tiny", "prompt": "x" * rng.randint(1, 200), "stream": True}
    body |= {"max_tokens": rng.randint(1, 240), "ignore_eos": True}
    stop_after = rng.randint(0, 300)
    async with limit, client.stream("POST", f"{url}/v1/completions", json=body) as got:
        assert got.status_code == 200
        count = 0
        async for _ in got.aiter_lines():
            count += 1
            if count > stop_after:
                return False
    return True


def test_disconnects_leave_the_engine_alive_and_the_pool_full(server):
    async def run():
        limit = asyncio.Semaphore(24)
        async with httpx.AsyncClient(timeout=300, headers=HEADERS) as client:
            jobs = [stream_and_hang_up(client, server, i, limit) for i in range(80)]
            return await asyncio.gather(*jobs)

    before = num_events(server)
    ended = asyncio.run(run())
    assert 8 < sum(ended) < 72, "both ends of a stream are wanted"
    wait_for_metric(server, "vllm:num_requests_running", 0)
    wait_for_metric(server, "vllm:kv_cache_usage_perc", 0)
    assert num_events(server) > before
    assert complete(server).status_code == 200
