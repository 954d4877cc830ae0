"""The routes without an engine: files that a test writes, and an app of Starlette's."""

import asyncio
import json
import re
import time
from functools import partial
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from support.live import event_record, snapshot_record
from vllm_kvpolicy.observe import routes
from vllm_kvpolicy.observe.metrics import CounterFile
from vllm_kvpolicy.observe.routes import PAGE, LiveRoutes
from vllm_kvpolicy.observe.shared_files import RANK, SCHEDULER, Ring

PATHS = ["/kv_policy", "/kv_policy/requests", "/kv_policy/requests/r"]
KEY = {"Authorization": "Bearer right"}


@pytest.fixture
def engine():
    """What an engine writes."""
    return SimpleNamespace(
        counters=CounterFile("one", create=True),
        scheduler=Ring(SCHEDULER.format("one"), create=True),
        rank=Ring(RANK.format("one", 0), create=True),
    )


def routes_of(keys=(), server=lambda: None, token_text=None):
    return LiveRoutes(
        facts=lambda: {"policy": "ams-tova"},
        engines=lambda: ({0: "one"}, 1),
        pool_blocks=lambda: 30,
        keys=list(keys),
        server=server,
        token_text=token_text,
    )


def client_of(**given):
    return TestClient(Starlette(routes=routes_of(**given).routes()))


@pytest.mark.parametrize("path", [*PATHS, "/kv_policy/stream"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}],
    ids=["none", "wrong", "no-scheme"],
)
def test_data_asks_for_a_key(engine, path, headers):
    answer = client_of(keys=["other", "right"]).get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json() == {"error": "Unauthorized"}


def test_a_key_opens_and_without_keys_all_is_open(engine):
    engine.rank.append(event_record())
    engine.counters.add("events", 4)
    for keys, headers in ((["other", "right"], KEY), ([], {})):
        client = client_of(keys=keys)
        found = [client.get(path, headers=headers).status_code for path in PATHS]
        assert found == [200] * 3
        overview = client.get("/kv_policy", headers=headers).json()
        assert overview["policy"] == "ams-tova"
        assert overview["counters"]["0"]["events"] == 4


def test_the_page_needs_no_key_holds_no_data_and_loads_nothing(engine):
    answer = client_of(keys=["right"]).get("/kv_policy/live")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = PAGE.read_text()
    assert answer.text == page
    assert not re.search(r"https?:|//\w+\.|@import|url\(|innerHTML = [^'`]", page)
    assert page.isascii() or set(re.findall(r"[^\x00-\x7f]", page)) <= set("–…·")


def test_an_answer_waits_for_an_engine_that_nobody_listened_to(engine):
    """It cannot know at once what a running engine does."""
    engine.counters.set("local_blocks", 3)
    client, started = client_of(), time.monotonic()
    (state,) = client.get("/kv_policy/requests").json()["engines"]
    assert time.monotonic() - started > 1 and not state["fresh"]
    assert engine.scheduler.is_heard()
    engine.scheduler.append(snapshot_record(time.monotonic(), ["r1"]))
    (state,) = client.get("/kv_policy/requests").json()["engines"]
    assert [row["id"] for row in state["requests"]] == ["r1"]


def test_a_request_has_its_last_event_and_an_unknown_one_is_an_error(engine):
    engine.rank.append(event_record(kept=[[1, 2], [3, 4]]))
    client = client_of()
    found = client.get("/kv_policy/requests/r").json()
    assert found["last"]["kept"] == [[1, 2], [3, 4]]
    assert found["now"] is None and len(found["events"]) == 1
    assert "tokens" not in found and "ids" not in found
    answer = client.get("/kv_policy/requests/x/y")
    assert answer.status_code == 404 and "'x/y'" in answer.json()["error"]


def test_text_is_answered_only_where_it_is_asked_for(engine, monkeypatch):
    tokens = {"kind": "tokens", "request": "r", "ids": "AQAAAAIAAAA="}
    engine.scheduler.append(tokens)
    plain = client_of().get("/kv_policy/requests/r").json()
    assert plain.keys() == {"id", "engine", "events", "now"}
    client = client_of(token_text=lambda token: f"<{token}>")
    for most, told in ((routes.MOST_TEXT, ["<1>", "<2>"]), (1, ["<2>"])):
        monkeypatch.setattr(routes, "MOST_TEXT", most)  # of long texts the newest
        found = client.get("/kv_policy/requests/r").json()
        assert (found["tokens"], found["first_token"]) == (told, 2 - len(told))


def read_stream(routes, until, during=()):
    """Return the messages of a stream up to one of a name."""
    found, steps = [], list(during)

    async def read():
        async for text in routes._messages({}):
            name, data = text.strip().split("\n")
            assert name.startswith("event: ") and data.startswith("data: ")
            found.append((name[7:], json.loads(data[6:])))
            if found[-1][0] == until:
                break
            if steps:
                steps.pop(0)()

    asyncio.run(asyncio.wait_for(read(), 20))
    return found


def test_a_stream_tells_facts_the_state_and_then_what_happens(engine):
    during = [
        lambda: engine.counters.set("local_blocks", 2),
        lambda: engine.rank.append(event_record()),
    ]
    found = read_stream(routes_of(), "event", during)
    names = [name for name, _ in found]
    assert names[:2] == ["server", "state"] and names[-1] == "event"
    assert found[-1][1]["position"] == 100
    assert engine.scheduler.is_heard()


def test_a_stream_ends_with_its_server(engine):
    server = SimpleNamespace(should_exit=False)
    end = partial(setattr, server, "should_exit", True)
    routes = routes_of(server=lambda: server)
    found = read_stream(routes, None, [lambda: None, end])
    assert [name for name, _ in found] == ["server", "state"]


def test_the_id_that_a_client_has_got_is_enough(engine):
    engine.rank.append(event_record(request="cmpl-7-0-abc"))
    client = client_of()
    assert client.get("/kv_policy/requests/cmpl-7").json()["id"] == "cmpl-7-0-abc"
    engine.rank.append(event_record(request="cmpl-7-1-def", serial=9))
    client = client_of()
    assert client.get("/kv_policy/requests/cmpl-7").status_code == 404
