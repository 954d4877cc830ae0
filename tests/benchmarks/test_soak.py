"""The soak: what it draws, what it notices, and a wave of the real thing."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.provenance import ROOT
from benchmarks.server import Server
from benchmarks.soak import __main__ as command
from benchmarks.soak import asks, fuzz, promises, slopes, storm, watch
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


def test_a_server_may_fail_only_where_stock_fails():
    failed, refused = Outcome(500, "no"), Outcome(400, "no")
    fuzz.check(PLAIN, refused, None, Ledger())
    fuzz.check(PLAIN, Outcome(None, "left"), None, Ledger())
    fuzz.check(PLAIN, failed, failed, Ledger())
    assert broken_by(fuzz.check, PLAIN, failed, refused) == "fuzz"
    assert broken_by(fuzz.check, PLAIN, Outcome(0, "reset"), None) == "fuzz"


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


def test_tracebacks_of_this_package_are_found(server):
    server.log.write_text(OWN)
    assert broken_by(watch.check_quiet, server, SAMPLE, SAMPLE, None) == "log"
    assert watch.own_traceback(server.log) == "OSError: no"
    refused = "vllm_kvpolicy.api.request_guards.KVPolicyRequestError: no"
    theirs = "vllm.exceptions.VLLMValidationError: no"
    changes = (("vllm_kvpolicy", "vllm"), ("OSError: no", refused))
    for harmless in (*changes, ("OSError: no", theirs)):
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


def test_answers_that_get_slower_than_stocks_are_found():
    stock = [1.0] * 10
    even = {"growth": 1.0, "low": 1.0, "high": 1.0}
    assert slopes.check_latency([2.0] * 10, stock, Ledger()) == even
    slower = [1.0] * 5 + [1.2] * 5
    assert slopes.check_latency(slower, slower, Ledger()) == even
    assert broken_by(slopes.check_latency, slower, stock) == "latency"
    assert slopes.check_latency(slower[:3], stock[:3], Ledger()) is None


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
