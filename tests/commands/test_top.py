"""`vllm-kvpolicy top` beside servers that a test plays, and beside the live routes."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from support.live import FACTS, KEY, PlayedEngine, serving_routes, snapshot_record
from support.servers.running_server import serve_handlers
from support.servers.servers import free_port
from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy.commands import top

PRESSED = FACTS | {"events": "pressure", "budget": 2048}
METRICS = (
    "# TYPE vllm:generation_tokens_total counter\n"
    'vllm:generation_tokens_total{{engine="0",model_name="a b"}} {0}.0\n'
    'vllm:generation_tokens_total{{engine="1",model_name="a b"}} {0}.0\n'
    'vllm:prompt_tokens_total{{engine="0"}} 7.0\n'
    'vllm:prompt_tokens_total_of_others{{engine="0"}} {0}.0\n'
)


def engine_state(names: list[str], **counters: float) -> dict[str, Any]:
    """Return what the live routes tell of an engine with these requests."""
    state = snapshot_record(0.0, names)
    return state | {"engine": 0, "fresh": True, "known": True, "counters": counters}


class LiveServer:
    """Answers as a server with the live page does.

    Each look finds 10 more events, each of which dropped 32 tokens per head, and 200
    generated tokens.

    Args:
        engines: in the answer of `/kv_policy/requests`.
        answer: in its place, where there is one.
        breaks_after: looks after which every answer is an error.
    """

    def __init__(
        self,
        engines: list[dict[str, Any]],
        facts: dict[str, Any] = FACTS,
        answer: str = "",
        breaks_after: int = 1000,
    ) -> None:
        self.engines, self.facts, self.answer = engines, facts, answer
        self.looks, self.breaks_after = 0, breaks_after

    async def overview(self, request: web.Request) -> web.Response:
        return web.json_response(self.facts)

    async def requests(self, request: web.Request) -> web.Response:
        self.looks += 1
        if self.looks > self.breaks_after:
            return web.Response(status=503, text="not\nnow")
        if self.answer:
            return web.Response(text=self.answer)
        engines = copy.deepcopy(self.engines)
        engines[0]["counters"]["events"] = 10 * self.looks
        engines[0]["counters"]["tokens_dropped"] = 320 * self.looks
        return web.json_response({"engines": engines})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS.format(100 * self.looks))

    def serve(self) -> Any:
        more = {"/kv_policy": self.overview, "/kv_policy/requests": self.requests}
        return serve_handlers("/none", self.overview, self.metrics, more)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two seconds go by where the command waits for one; Ctrl-C comes at `most`."""
    found = SimpleNamespace(now=0.0, sleeps=0, most=1000)

    def sleep(seconds: float) -> None:
        found.now, found.sleeps = found.now + 2, found.sleeps + 1
        if found.sleeps > found.most:
            raise KeyboardInterrupt

    fake = SimpleNamespace(monotonic=lambda: found.now, sleep=sleep)
    monkeypatch.setattr(top, "time", fake)
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def frame_of(server: LiveServer, capsys: pytest.CaptureFixture) -> list[str]:
    """Return the lines of one frame, by the command."""
    with server.serve() as url:
        assert command.main(["top", "--once", "--url", url]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    return [line.rstrip() for line in printed.out.splitlines()]


def test_a_frame(clock, capsys):
    ended = {"bounded_requests": 9, "uncut_requests": 5}
    names = ["short", "waits", "long"]
    engine = engine_state(names, preemptions_bounded=2, **ended)
    short, waits, long = engine["requests"]
    short |= {"computed": 60, "held": 60, "uncut": True, "events": 0}
    waits |= {"running": False, "computed": 0, "held": 0, "blocks": 0}
    long |= {"computed": 4000, "held": 1000, "blocks": 32, "events": 7}
    engine |= {"running": 2, "waiting": 1}
    lines = frame_of(LiveServer([engine]), capsys)
    assert [line.split("  ")[0] for line in lines if line[:1].strip()] == [
        *("server", "pool", "requests", "a second"),
        *("request", "long", "short", "waits"),
    ]
    assert lines[0].endswith("  ams-tova on tiny")
    assert lines[1].strip() == (
        "budget 64 tokens per KV head, an event every 32 tokens"
    )
    # 5 of 30 superblocks hold local tokens, 2 survivors.
    assert lines[2].endswith(f"[#####=={'.' * 25}] 23% of 30 superblocks")
    assert lines[3].strip() == "# 5 local, = 2 survivors; stock would hold 9"
    assert lines[4].endswith("2 run, 1 wait; stock could run 1")
    assert lines[5].strip() == (
        "since the start 2 preemptions, 20 events; 4 of 9 that ended were cut"
    )
    assert lines[6].endswith(
        "5.0 events, 160 tokens dropped per head, 100 generated, 0 of prompts"
    )
    assert [" ".join(line.split()) for line in lines[8:]] == [
        "request policy computed held kept least blocks events",
        "long ams-tova 4,000 1,000 25% 64 32 7",
        "short ams-tova 60 60 all 64 3 0",
        "waits ams-tova (waits) 0 0 - 64 0 1",
    ]


def test_the_level_of_a_pool(clock, capsys):
    engine = engine_state(["cut", "pinned"], level_tokens=2200)
    cut, pinned = engine["requests"]
    cut |= {"computed": 9000, "held": 2600, "floor": 2048}
    pinned |= {"computed": 9000, "held": 2700, "floor": 2148, "pinned": 100}
    engine["pool"] |= {"local": 40, "global": 130, "total": 320, "stock": 0}
    lines = frame_of(LiveServer([engine], PRESSED), capsys)
    assert lines[1].strip() == (
        "cut when the pool runs short, not below 2,048 tokens per KV head"
    )
    # 400 tokens of each are above the level: 25 superblocks of 32 tokens.
    assert lines[2].endswith(f"[####==========|=={'.' * 15}] 53% of 320 superblocks")
    assert lines[4].strip() == (
        "| level: 2,200 tokens per KV head, 145 superblocks if all were cut to it"
    )
    # Where nobody who runs was cut there is none.
    cut["uncut"], pinned["running"] = True, False
    assert not any("level" in line for line in frame_of(LiveServer([engine]), capsys))


def test_each_engine_has_a_pool_and_what_is_not_told_is_said(clock, capsys):
    silent = engine_state([]) | {"engine": 1, "fresh": False}
    off = engine_state([], observers_off_live=1) | {"engine": 2}
    many = engine_state(["a"]) | {"running": 600, "waiting": 5}
    facts = FACTS | {"engines": [0, 1, 2], "all_engines": 4}
    text = "\n".join(frame_of(LiveServer([many, silent, off], facts), capsys))
    assert all(f"pool {index}" in text for index in range(3))
    assert "1 engines on other hosts are not shown" in " ".join(text.split())
    assert text.count("the engine has not told lately") == 1
    assert text.count("tells of no requests any more") == 1
    assert text.endswith("and 604 more")


def test_a_terminal_obeys_no_id(clock, capsys):
    engine = engine_state(["\x1b]0;x\x07[red]y"])
    line = frame_of(LiveServer([engine]), capsys)[-1]
    assert line.startswith("?]0;x?[red]y")


@pytest.fixture
def routes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[PlayedEngine, str]]:
    """The live routes themselves, beside an engine that a test plays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    port = free_port()
    with PlayedEngine(3, 1) as engine, serving_routes(port):
        yield engine, f"http://127.0.0.1:{port}"


def test_the_live_routes_tell_what_a_frame_needs(routes, monkeypatch, capsys):
    engine, url = routes
    words = ["top", "--once", "--url", url]
    assert command.main(words) == 1
    told = f"vllm-kvpolicy top: error: {url} wants another API key: give --api-key"
    assert capsys.readouterr().err.startswith(told)
    assert command.main([*words, "--api-key", "wrong"]) == 1
    assert capsys.readouterr().err.startswith(told)
    assert command.main([*words, "--api-key", KEY]) == 0
    text = capsys.readouterr().out
    assert "3 run, 0 wait" in text and "23% of 30 superblocks" in text
    assert all(name[:8] in text for name in engine.names)
    assert "generated: not told" in text  # there is no /metrics here
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert command.main(words) == 0
    assert "3 run, 0 wait" in capsys.readouterr().out


async def _policy(request: web.Request) -> web.Response:
    return web.Response(text="# HELP\nvllm:a 1\nkvpolicy_events_total 1\n")


async def _stock(request: web.Request) -> web.Response:
    return web.Response(text="# HELP\nvllm:a 1\n")


async def _other(request: web.Request) -> web.Response:
    return web.Response(status=404, text="no")


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (_policy, "{} has no live page: start it with --kv-live"),
        (_stock, "{} has no policy: start it with --kv-policy NAME --kv-live"),
        (_other, "{} is no server of vLLM with --kv-live: it has no /kv_policy"),
    ],
)
def test_servers_without_a_live_page(metrics, told, capsys):
    with serve_handlers("/none", _other, metrics) as url:
        assert command.main(["top", "--url", f"{url}/v1"]) == 1
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err == f"vllm-kvpolicy top: error: {told.format(url)}\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("<html>", "got no JSON"),
        ("[1]", "got [1], expected an object"),
        ("{}", "got an answer of another shape ('engines')"),
        ('{"engines": [3]}', "got an answer of another shape"),
        ('{"engines": [{"counters": {}}]}', "got an answer of another shape"),
    ],
)
def test_answers_of_another_kind(answer, told, clock, capsys):
    with LiveServer([], answer=answer).serve() as url:
        assert command.main(["top", "--once", "--url", url]) == 1
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"vllm-kvpolicy top: error: {url}/kv_policy")
    assert told in line and not printed.out


def test_nobody_answers(capsys, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    assert command.main(["top", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm-kvpolicy top: error: {url}: no answer: ")
    with pytest.raises(SystemExit) as stopped:
        command.main(["top", "--url", "localhost:8000"])
    assert stopped.value.code == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    assert command.main(["top", "--url", url]) == 1
    assert "pip install rich" in capsys.readouterr().err


def test_a_terminal_shows_what_fits_and_gets_its_screen_back(
    clock, monkeypatch, capsys
):
    for name, value in (("FORCE_COLOR", "1"), ("LINES", "15"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    clock.most = 3  # one before the first frame, and one after each of two
    server = LiveServer([engine_state([f"r{index:02}" for index in range(20)])])
    with server.serve() as url:
        assert command.main(["top", "--url", url]) == 130
    printed = capsys.readouterr()
    assert printed.out.count("\x1b[?1049h") == printed.out.count("\x1b[?1049l") == 1
    # Seven lines of the head, a blank one, names of columns, 5 requests, and the rest.
    assert printed.out.count("and 15 more") == 3
    assert "r04" in printed.out and "r05" not in printed.out
    assert not printed.err


def test_a_server_that_stops_answering_is_asked_again(clock, capsys):
    clock.most = 5
    server = LiveServer([engine_state(["a"])], breaks_after=3)
    with server.serve() as url:
        assert command.main(["top", "--url", url]) == 130
    frames = capsys.readouterr().out.split("server")[1:]
    assert [f"{url}/kv_policy/requests: HTTP 503: not" in each for each in frames] == [
        *(False, False, True, True, True)
    ]
    assert all("5.0 events" in each for each in frames)
    assert server.looks == 6


def test_a_server_that_comes_back_may_be_another_one(clock):
    server = LiveServer([engine_state(["a"])], breaks_after=2)
    with server.serve() as url:
        watch = top.Watch(top.Client(url, None, 5))
        watch.look()
        watch.look()
        with pytest.raises(ValueError, match="503"):
            watch.look()
        server.facts, server.breaks_after = FACTS | {"policy": "snapkv"}, 100
        assert watch.trouble and watch.frame(None)
        watch.look()
    assert not watch.trouble and watch._facts["policy"] == "snapkv"
    assert len(watch._samples) == 1  # of the other one nothing is compared


def test_a_counter_that_begins_again_is_no_negative_rate():
    before = top.Sample(1.0, [], {"events": 50, "dropped": 10, "generated": None})
    after = top.Sample(3.0, [], {"events": 4, "dropped": 20, "generated": 9})
    assert top.rates(before, after) == {"events": 0, "dropped": 5, "generated": None}


def test_rates_are_means_over_five_looks(clock):
    server = LiveServer([engine_state(["a"])])
    with server.serve() as url:
        watch = top.Watch(top.Client(url, None, 5))
        for look in range(8):
            watch.look()
            # Two seconds lie between two looks, and behind the first ones a minute.
            top.time.sleep(1)
            clock.now += 60 * (look < 2)
    before, after = watch._samples[0], watch._samples[-1]
    assert top.rates(before, after)["events"] == 5 and after.at - before.at == 10


def test_it_needs_no_vllm():
    code = (
        "import sys\nfor name in ('vllm', 'torch', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from vllm_kvpolicy.commands import frames, top\ntop._parser()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
