"""The soak: what it draws, what it notices, and a wave of the real thing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from benchmarks.provenance import ROOT
from benchmarks.server import Server, ServerError
from benchmarks.soak import __main__ as command
from benchmarks.soak import (
    asks,
    faults,
    fuzz,
    probes,
    promises,
    slopes,
    storm,
    watch,
    waves,
)
from benchmarks.soak.promises import BrokenPromise, Ledger
from benchmarks.soak.storm import Outcome

PLAIN = asks.Ask("completion", asks.COMPLETIONS, {"prompt": "a", "n": 2})
OPENAPI = {
    "paths": {
        "/v1/completions": {
            "post": {"requestBody": {"schema": {"$ref": "#/components/schemas/Body"}}}
        },
        "/scale_elastic_ep": {"post": {}},
        "/metrics": {"get": {}},
    },
    "components": {"schemas": {"Body": {"properties": {"n": {}, "stop": {}}}}},
}
IDLE = dict.fromkeys((*watch.EMPTY, *watch.EMPTY_OF_POLICIES), 0.0)
SAMPLE = watch.Sample(52, {"api": 10}, {"api": 20}, {"api": 5}, {"api": 77})
OWN = """(Worker pid=3) INFO fine
(Worker pid=3) Traceback (most recent call last):
(Worker pid=3)   File "/x/vllm_kvpolicy/worker/worker.py", line 3, in f
(Worker pid=3)     raise OSError
(Worker pid=3) OSError: no
(Worker pid=3) INFO fine
"""


def choice(index: int, reason: str | None, text: str = "") -> dict:
    return {"index": index, "text": text, "finish_reason": reason}


def answer(*choices: dict) -> Outcome:
    return Outcome(200, json.dumps({"choices": choices}))


def stream(*events: dict) -> Outcome:
    return Outcome(200, [*events, {"done": True}])


def broken_by(check, *arguments) -> str:
    """Return the name of the promise that a check finds broken."""
    with pytest.raises(BrokenPromise) as error:
        check(*arguments, Ledger())
    assert "\n" not in str(error.value)
    return error.value.promise.name


def test_a_seed_gives_the_same_requests_and_another_gives_others():
    wave = asks.draw_wave(3, 1, 200)
    assert wave == asks.draw_wave(3, 1, 200)
    assert wave != asks.draw_wave(4, 1, 200) and wave != asks.draw_wave(3, 2, 200)
    malformed = fuzz.draw(3, 1, 50, OPENAPI, True)
    assert malformed == fuzz.draw(3, 1, 50, OPENAPI, True)
    assert malformed != fuzz.draw(4, 1, 50, OPENAPI, True)


def test_a_wave_has_everything_that_it_is_there_for():
    wave = asks.draw_wave(0, 0, 400)
    knobs = [ask.body.get("vllm_xargs", {}) for ask in wave if ask.refused is None]
    assert {each.get("kv_policy") for each in knobs} >= {
        *("ams-tova", "adakv-snapkv", "wgkv+snapkv", "hard-snapkv", "quest", "none")
    }
    assert {ask.structure for ask in wave} == {None, "json", "choice", "regex"}
    assert {ask.body.get("priority", 0) for ask in wave} >= {-3, 0, 3}
    assert max(ask.body.get("n", 1) for ask in wave) == 4
    left = [ask for ask in wave if ask.leaves is not None]
    assert 50 < len(left) < 200 and not any(ask.refused for ask in left)
    assert sum(ask.refused is not None for ask in wave) > 20


def test_stock_gets_the_same_requests_without_our_keys():
    for ask in [*asks.draw_wave(0, 0, 50), *fuzz.draw(0, 0, 50, OPENAPI, True)]:
        plain = ask.without_knobs()
        assert not isinstance(plain.body, dict) or "vllm_xargs" not in plain.body
        assert plain.path == ask.path and plain.leaves == ask.leaves


def test_malformed_requests_go_to_posts_that_leave_the_server_as_it_is():
    drawn = fuzz.draw(0, 0, 100, OPENAPI, True)
    assert {ask.path for ask in drawn} == {"/v1/completions"}
    assert all(ask.leaves is not None for ask in drawn)
    keys = {key for ask in drawn if isinstance(ask.body, dict) for key in ask.body}
    assert keys >= {"stop", "vllm_xargs"}


WHOLE = answer(choice(0, "stop"), choice(1, "length"))


@pytest.mark.parametrize(
    ("outcome", "is_broken"),
    [
        (WHOLE, False),
        (Outcome(None, "left"), False),
        (stream({"choices": [choice(0, "stop")]}, {"choices": [choice(1, "stop")]}), 0),
        (answer(choice(0, "stop")), True),
        (answer(choice(0, "stop"), choice(1, "abort")), True),
        (stream({"choices": [choice(0, "stop")]}), True),
        (stream({"error": "dead"}), True),
        (Outcome(500, "no"), True),
        (Outcome(0, "ClientError()"), True),
    ],
)
def test_answers_that_are_not_whole_break_a_promise(outcome, is_broken):
    if is_broken:
        assert broken_by(storm.judge, PLAIN, outcome) == "answers"
    else:
        storm.judge(PLAIN, outcome, Ledger())


@pytest.mark.parametrize(
    ("path", "payload", "is_whole"),
    [
        (asks.RESPONSES, '{"status": "incomplete"}', True),
        (asks.RESPONSES, '{"status": "failed"}', False),
        (asks.RESPONSES, [{"type": "response.completed"}], True),
        (asks.RESPONSES, [{"type": "response.created"}], False),
        (asks.MESSAGES, '{"stop_reason": "end_turn"}', True),
        (asks.MESSAGES, '{"stop_reason": null}', False),
        (asks.MESSAGES, [{"type": "message_stop"}], True),
    ],
)
def test_ends_of_other_endpoints(path, payload, is_whole):
    ask = asks.Ask("other", path, {})
    assert storm.is_whole(ask, Outcome(200, payload)) == is_whole


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("choice", "yes", "yess"),
        ("regex", "abab-12", "abab-1"),
        ("json", '{"a": 7}', '{"a": 100}'),
        ("json", '{ "a":0 }', '{"a": 1, "b": 2}'),
        ("json", '{"a":5}', '{"a": 5'),
        ("json", '{"a":5}', '{"a": true}'),
    ],
)
def test_structure(kind, good, bad):
    ask = asks.Ask("s", asks.COMPLETIONS, {}, structure=kind)
    storm.judge(ask, answer(choice(0, "stop", good)), Ledger())
    storm.judge(ask, answer(choice(0, "length", bad)), Ledger())  # was cut off
    cut = stream({"choices": [choice(0, None, bad[:2])]})
    cut.payload.insert(1, {"choices": [choice(0, "stop", bad[2:])]})
    assert broken_by(storm.judge, ask, cut) == "structure"


@pytest.mark.parametrize(
    ("status", "message", "is_kept"),
    [
        (400, "kv_budget: got 'x'", True),
        (400, "no", False),
        (400, "kv_budget:\nno", False),
        (500, "kv_budget: got 'x'", False),
        (200, "kv_budget: got 'x'", False),
    ],
)
def test_refusals(status, message, is_kept):
    ask = replace(PLAIN, refused="kv_budget")
    outcome = Outcome(status, json.dumps({"error": {"message": message}}))
    if is_kept:
        storm.judge(ask, outcome, Ledger())
    else:
        assert broken_by(storm.judge, ask, outcome) == "refusals"


def test_a_connection_that_the_server_closes_takes_no_other_request_along():
    async def play() -> list[Outcome]:
        server = await asyncio.start_server(fail_and_close, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await storm.play(f"http://127.0.0.1:{port}", [PLAIN] * 40)

    async def fail_and_close(reader, writer):
        # As vLLM after an exception: keep-alive is promised, and the connection closed.
        await reader.readuntil(b"\r\n\r\n")
        body = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
        writer.write(body)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    assert {outcome.status for outcome in asyncio.run(play())} == {500}


def test_a_server_may_fail_only_where_stock_fails():
    failed, refused = Outcome(500, "no"), Outcome(400, "no")
    fuzz.check(PLAIN, refused, None, Ledger())
    fuzz.check(PLAIN, Outcome(None, "left"), None, Ledger())
    fuzz.check(PLAIN, failed, failed, Ledger())
    assert broken_by(fuzz.check, PLAIN, failed, refused) == "fuzz"
    assert broken_by(fuzz.check, PLAIN, Outcome(0, "reset"), None) == "fuzz"


def test_a_probe_that_differs_says_where():
    known = probes.Probe("quest", "q", "3>BA3;8>DE8", 0.5)
    said = probes.difference(known, replace(known, text="3>BA3;8>DE7"), None)
    assert "quest" in said and "from character 10 on" in said


def test_a_probe_that_gets_no_answer_has_changed(monkeypatch):
    known = probes.Probe("quest", "q", "3>BA3;8>DE8", 0.5)

    async def ask(session, policy, prompt, salt):
        if policy == "quest":
            raise probes.NoProbe("quest: 500 no")
        return replace(known, policy=policy, text="3>BA3" if policy == "none" else "")

    monkeypatch.setattr(probes, "ask", ask)
    asked = [known, replace(known, policy="none", text="3>BA3")]
    asked.append(replace(known, policy="ams-tova"))
    seconds, found = asyncio.run(probes.check("http://x", asked, 1))
    assert found[:2] == ["quest: 500 no", None] and "ams-tova" in found[2]
    assert len(seconds) == 2


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_server_that_ends_is_a_broken_promise_and_stock_that_ends_is_not(
    is_ours, server, monkeypatch
):
    async def refused(server):
        raise aiohttp.ClientOSError("refused")

    monkeypatch.setattr(waves.watch, "wait_for_quiet", refused)
    sides = waves.Side(server), waves.Side(replace(server, name="stock"))
    soak = waves.Soak(*sides, 0, Ledger())
    with pytest.raises(BrokenPromise if is_ours else ServerError) as error:
        asyncio.run(soak._look(sides[not is_ours], 0))
    assert "does not answer any more" in str(error.value)
    assert soak.ledger.checks == ({"engine": 1} if is_ours else {})


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_answers_of_the_server_with_policies_are_promised(
    is_ours, server, monkeypatch
):
    async def quiet(server):
        return None

    async def changed(url, questions, number):
        return [1.0], ["it differs"]

    monkeypatch.setattr(waves.watch, "wait_for_quiet", quiet)
    monkeypatch.setattr(waves.watch, "sample", lambda server, requests: SAMPLE)
    monkeypatch.setattr(waves.probes, "check", changed)
    sides = waves.Side(server), waves.Side(replace(server, name="stock"))
    soak = waves.Soak(*sides, 0, Ledger())
    if is_ours:
        with pytest.raises(BrokenPromise, match="it differs"):
            asyncio.run(soak._look(sides[0], 0))
    else:
        asyncio.run(soak._look(sides[1], 0))
    assert soak.stock_changes == (not is_ours)


def test_two_processes_of_one_name_are_both_seen(monkeypatch):
    sleeper = "import subprocess as s; s.run(['sleep', '60'])"
    process = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    monkeypatch.setattr(watch, "role_of", lambda process: "worker")
    one = Server("policies", (), "", None, process)  # type: ignore[arg-type]
    try:
        deadline = time.monotonic() + 30
        while len(pids := watch.sample(one, 0).pids) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert pids["worker"] == process.pid and len(set(pids.values())) == 2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """A server of which there is only a log."""
    log = tmp_path / "log"
    log.write_text("INFO fine\n")
    return Server("policies", (), "", log, None)  # type: ignore[arg-type]


def test_a_quiet_moment_that_is_as_it_should_be(server):
    watch.check_quiet(server, SAMPLE, SAMPLE, None, Ledger())
    assert watch.not_empty(IDLE, True) == {}


@pytest.mark.parametrize("name", IDLE)
def test_blocks_and_requests_that_are_left_are_seen(name, server):
    left = watch.not_empty(IDLE | {name: 1.0}, True)
    assert left == {name: 1.0}
    assert broken_by(watch.check_quiet, server, SAMPLE, SAMPLE, str(left)) == "pool"


def test_a_gauge_that_is_missing_is_not_empty():
    gauges = {name: value for name, value in IDLE.items() if "global" not in name}
    assert watch.not_empty(gauges, True) == {"kvpolicy_global_blocks": -1.0}
    gone = watch.not_empty(dict.fromkeys(watch.EMPTY, 0.0), True)
    assert gone == dict.fromkeys(watch.EMPTY_OF_POLICIES, -1.0)
    assert watch.not_empty(dict.fromkeys(watch.EMPTY, 0.0), False) == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"pids": {"api": 78}}, "engine"),
        ({"descriptors": {"api": 20 + watch.SPARE_DESCRIPTORS + 1}}, "descriptors"),
        ({"threads": {"api": 5 + watch.SPARE_THREADS + 1}}, "descriptors"),
    ],
)
def test_what_processes_may_not_do(change, name, server):
    now = replace(SAMPLE, **change)
    assert broken_by(watch.check_quiet, server, SAMPLE, now, None) == name


def test_tracebacks_of_this_package_are_found(server):
    server.log.write_text(OWN)
    assert broken_by(watch.check_quiet, server, SAMPLE, SAMPLE, None) == "log"
    assert watch.own_traceback(server.log) == "OSError: no"
    refused = "vllm_kvpolicy.api.request_guards.KVPolicyRequestError: no"
    for harmless in (("vllm_kvpolicy", "vllm"), ("OSError: no", refused)):
        server.log.write_text(OWN.replace(*harmless))
        assert watch.own_traceback(server.log) is None


def made_series(
    leak: float, seed: int = 0
) -> tuple[list[int], list[float], list[float]]:
    """Return requests, and bytes of a server that leaks and of one that does not."""
    rng = np.random.default_rng(0)
    requests = [52 * moment for moment in range(1, 61)]
    noise = rng.normal(0, 200_000, size=(2, 60))
    ours = [9e8 + leak * n + noise[0][i] for i, n in enumerate(requests)]
    stock = [8e8 + noise[1][i] for i in range(len(requests))]
    return requests, ours, stock


def test_a_leak_beside_stock_is_found_and_noise_is_not():
    assert broken_by(slopes.check_memory, *made_series(5000)) == "memory"
    found = slopes.check_memory(*made_series(0), Ledger())
    assert found is not None and abs(found["difference"]["bytes_per_request"]) < 300
    few = [each[:9] for each in made_series(5000)]
    assert slopes.check_memory(*few, Ledger()) is None


def test_a_jump_is_no_slope():
    requests, ours, stock = made_series(0)
    jumped = [each + 2e7 * (i > 55) for i, each in enumerate(ours)]
    assert slopes.check_memory(requests, jumped, stock, Ledger()) is not None


def test_growth_that_stock_has_too_is_no_leak():
    requests, ours, stock = made_series(5000)
    assert slopes.check_memory(requests, ours, ours, Ledger()) is not None


def test_answers_that_get_slower_than_stocks_are_found():
    stock = [1.0] * 10
    even = {"growth": 1.0, "low": 1.0, "high": 1.0}
    assert slopes.check_latency([2.0] * 10, stock, Ledger()) == even
    slower = [1.0] * 5 + [1.2] * 5
    assert slopes.check_latency(slower, slower, Ledger()) == even
    assert broken_by(slopes.check_latency, slower, stock) == "latency"
    assert slopes.check_latency(slower[:3], stock[:3], Ledger()) is None


def test_answers_that_take_twice_as_long_are_found_however_noisy():
    noisy = [0.5, 1.0, 1.0, 1.8, 1.0, 3.0, 1.0, 2.2]
    assert broken_by(slopes.check_latency, noisy, [1.0] * 8) == "latency"


def test_the_limit_that_broke_is_named():
    steady = [1.0] * 5 + [1.2] * 5
    noisy = [0.3, 1.0, 1.8, 1.0, 1.0, 0.8, 3.0, 2.0, 0.9, 3.0]
    for ratios, limit in ((steady, "1.1 x by the low end"), (noisy, "1.5 x in any")):
        with pytest.raises(BrokenPromise, match=f"expected at most {limit}"):
            slopes.check_latency(ratios, [1.0] * len(ratios), Ledger())


def test_a_time_that_wanders_is_no_growth():
    """Neighbours are alike: single draws take 9 of 40 such series for growth."""
    found = 0
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(size=60)
        for i in range(1, 60):
            noise[i] += 0.7 * noise[i - 1]
        said = slopes.check_latency(np.exp(0.03 * noise), np.ones(60), Ledger())
        found += said["low"] > 1
    assert found <= 5


def test_single_slow_moments_are_no_growth():
    rng = np.random.default_rng(0)
    noisy = rng.lognormal(0, 0.3, size=60)
    found = slopes.check_latency(noisy.tolist(), [1.0] * 60, Ledger())
    assert found is not None and found["low"] < 1 < found["high"]


def test_the_first_broken_promise_ends_the_run_with_its_sentence(
    tmp_path, monkeypatch, capsys
):
    def soak(options, logs, record):
        record["checks"] = {"pool": 1}
        Ledger().check(promises.POOL, False, "2 blocks are held\nin line two")

    monkeypatch.setattr(command, "soak", soak)
    out = tmp_path / "record.json"
    words = ["--out", str(out), "--logs", str(tmp_path / "logs"), "--seed", "5"]
    assert command.main(words) == 1
    record = json.loads(out.read_text())
    assert record["seed"] == 5
    assert record["broken"] == (
        f"pool: {promises.POOL.sentence} But 2 blocks are held in line two"
    )
    assert str(tmp_path / "logs") in capsys.readouterr().err


def test_the_page_has_every_promise():
    page = " ".join((ROOT / "docs/reliability.md").read_text().split())
    every = (*promises.OF_SOAK, *promises.OF_FAULTS)
    assert [each.name for each in every if each.sentence not in page] == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ServerError("stock: exited with status 1; the log ends with\na\nb"),
            "stock: e",
        ),
        (probes.NoProbe("quest: the clearest\nmargin is 0.0"), "quest: the clearest m"),
        (aiohttp.ServerDisconnectedError(), "Server disconnected"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_a_record(
    error, said, tmp_path, monkeypatch, capsys
):
    @contextmanager
    def no_servers(options, logs):
        raise error
        yield

    monkeypatch.setattr(command, "both_servers", no_servers)
    out = tmp_path / "record.json"
    logs = tmp_path / "logs"
    assert command.main(["--out", str(out), "--logs", str(logs)]) == 2
    record = json.loads(out.read_text())
    assert record["broken"] is None and record["not_checked"].startswith(said)
    assert record["checks"]["answers"] == 0
    first, _ = capsys.readouterr().err.splitlines()
    assert said in first and str(logs) in first


def test_an_ended_process_runs_no_more_though_nobody_has_collected_it():
    process = subprocess.Popen(["sleep", "60"])
    found = psutil.Process(process.pid)
    assert faults.still_running([found], 0) == [found]
    process.kill()
    assert faults.still_running([found], 30) == []
    assert found.status() == psutil.STATUS_ZOMBIE
    process.wait()
    assert faults.still_running([found], 0) == []


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(1200)
def test_a_wave_on_real_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(command.faults, "run", lambda *arguments: None)
    out = tmp_path / "record.json"
    words = ["--minutes", "0", "--out", str(out), "--logs", str(tmp_path / "logs")]
    status = command.main(words)
    record = json.loads(out.read_text())
    without = ["memory", "latency", *(each.name for each in promises.OF_FAULTS)]
    assert record["broken"] is None
    assert record["not_checked"] == f"nothing has checked {', '.join(without)}"
    assert status == 2
    done = {name for name, count in record["checks"].items() if count}
    assert done == {each.name for each in promises.OF_SOAK} - set(without)
