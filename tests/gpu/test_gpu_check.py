"""What `make gpu-check` does, tried out on a CPU: no graphs, the V1 runner, float32."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.check import engines, oracles, syncs
from benchmarks.gpu.check.compare import Agreement, assert_alike, assert_same, compare
from benchmarks.gpu.check.kernels import check_twins
from benchmarks.gpu.check.runner import (
    GRACE_SECONDS,
    GROUPS,
    ROOT,
    Checks,
    environment,
    lines_of,
    run_all,
)
from benchmarks.gpu.check.where import Graphs, Where
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, SMALL_SIZES, operations
from benchmarks.gpu.models import drawn_weights, write_model
from support.engine.helpers import Job, Result, Run, make_jobs
from support.engine.oracle_replay import Mismatch
from vllm_kvpolicy.policies.names import parse
from vllm_kvpolicy.worker import runtime
from vllm_kvpolicy.worker.tiers.equal import EqualTier
from vllm_kvpolicy.worker.tiers.tier import StepMetadata

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tries the checks out where there is no GPU"
)
SETTINGS = {"block_size": 32}
POLICIES = ("ams-tova", "snapkv", "keydiff", "streaming")
RAGGED = ("adakv-snapkv", "hard-snapkv", "pyramid-keydiff", "hard-tova")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in this process, on one thread, and fewer steps to watch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(1)
    monkeypatch.setattr(syncs, "STEPS", 90)
    monkeypatch.setattr(syncs, "REQUESTS", 4)


@pytest.fixture
def checks(tmp_path: Path) -> Checks:
    return Checks("group", tmp_path / "lines.jsonl")


def details(checks: Checks) -> dict[str, str]:
    """Return what passed, by name; fail if anything did not."""
    lines = lines_of(checks.path)
    failed = [line for line in lines if not line["ok"]]
    assert not failed, "; ".join(line["detail"] for line in failed)
    return {line["check"]: line["detail"] for line in lines}


def where(model: Path) -> Where:
    """Return the tiny model on this CPU."""
    jobs = make_jobs((100, 150), 90, seed=5)
    return Where(model, SETTINGS, 400, 11, jobs, "", POLICIES, 130)


# -- engines ---------------------------------------------------------------------------


@pytest.mark.slow
def test_engines(tiny_model: Path, checks: Checks) -> None:
    place = where(tiny_model)
    stock = engines.check_stock(checks, place)
    movers = ("identity", "holes", engines.RAGGED)
    engines.check_movers(checks, place, stock, movers)
    engines.check_infinite(checks, place, stock)
    engines.check_policies(checks, place)
    found = details(checks)
    assert "1/1 identical" in found["stock beside itself, alone"]
    for mover in ("identity", "holes"):
        assert found[mover].startswith("2/2 identical")
        assert "preemptions: 2/2 identical" in found[mover]
    assert found["identity, ragged"].startswith("2/2 identical")
    assert "2/2 identical" in found["infinite budget"]
    policies = found["ams-tova, snapkv, keydiff, streaming"]
    assert "blocks back" in policies and policies.endswith(" preemptions")


def test_a_model_without_weights(
    tmp_path: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way in which models of 8 billion parameters are checked."""
    settings = {"load_format": drawn_weights(), "skip_tokenizer_init": True}
    place = replace(
        where(write_model("tiny", tmp_path)),
        settings=SETTINGS | settings,
        tight_blocks=0,
        jobs=make_jobs((150, 190), 60),
    )
    stock = engines.check_stock(checks, place)
    tokens = [token for result in stock.run.results.values() for token in result.tokens]
    assert len(set(tokens)) > 10  # weights as vLLM leaves them answer one token
    engines.check_movers(checks, place, stock, ("holes",))
    assert set(details(checks)) == {"stock beside itself, alone", "holes"}
    # Attention that reads vLLM's own tables, as a graph of stock vLLM would, is found.
    monkeypatch.setattr(
        EqualTier, "metadata", lambda self, step: StepMetadata(step.metadata)
    )
    engines.check_movers(checks, place, stock, ("holes",))
    last = lines_of(checks.path)[-1]
    assert (last["check"], last["ok"]) == ("holes", False)
    assert "allowed" in last["detail"] or "near tie" in last["detail"]


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_oracles(checks: Checks, ragged: bool) -> None:
    settings = {**oracles.TIGHT, **SETTINGS}
    policies = RAGGED if ragged else POLICIES
    what = oracles.Oracles(policies, settings, num_blocks=30)
    oracles.check_oracles(checks, what)
    found = details(checks)
    tier = ", own lengths" if ragged else ""
    strained = found[f"a run that strains the engine{tier}"]
    assert "4 policies" in strained and len(found) == (3 if ragged else 4)
    assert "decisions, 0 differ" in found[f"selection is the policies'{tier}"]


def test_every_request_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong does not hide the next."""

    def judge(decoder: Any, result: Result) -> float:
        if result.job.name in ("b", "d"):
            raise Mismatch(f"{result.job.name} is wrong")
        return 1e-4 if result.job.name == "c" else 1e-5

    monkeypatch.setattr(oracles, "check_replay", judge)
    results = [Result(Job(name, [5], 1), [5], [], []) for name in "abcd"]
    worst, wrong = oracles.replayed(None, results)
    assert (worst, wrong) == (1e-4, ["b is wrong", "d is wrong"])


def test_every_policy_is_tried() -> None:
    names, ragged = map(engines.served_names, (False, True))
    assert {"ams-tova", "snapkv", "rkv", "epikv", "strat-keydiff"} < set(names)
    assert not any(parse(name).is_test for name in names + ragged)
    assert "qfilter" not in names and "adakv-snapkv" not in names
    assert {"adakv-snapkv", "hard-tova", "pyramid-keydiff"} < set(ragged)


def fake_engine(**facts: Any) -> Any:
    """Return as much of an engine on a GPU as `Graphs` looks at."""
    manager = SimpleNamespace(graphs={1: "graph"}, run_fullgraph=lambda desc: desc)
    runner = SimpleNamespace(cudagraph_manager=manager)
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    scheduler = SimpleNamespace(async_scheduling=facts.get("async_scheduling", True))
    config = SimpleNamespace(scheduler_config=scheduler)
    return SimpleNamespace(
        worker=SimpleNamespace(
            model_runner=runner,
            use_v2_model_runner=True,
            kv_policy_setup=SimpleNamespace(
                layers=[SimpleNamespace(attn_backend=backend)]
            ),
        ),
        runtime=SimpleNamespace(requests=facts.get("requests", {"r": 0})),
        llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)),
    )


def replayed(engine: Any, times: int) -> Graphs:
    """Return what counts the replays of an engine's graphs, after so many."""
    graphs = Graphs(engine, "FLASH_ATTN")
    for desc in range(times):
        assert engine.worker.model_runner.cudagraph_manager.run_fullgraph(desc) == desc
    return graphs


def test_graphs_are_counted() -> None:
    assert replayed(fake_engine(), 9).proof(10) == ["1 graphs, 9 replays in 10 steps"]
    with pytest.raises(AssertionError, match="7 of 10 steps"):
        replayed(fake_engine(), 7).proof(10)
    before_events = replayed(fake_engine(requests={}), 9)
    assert before_events.proof(10, with_events=False)
    with pytest.raises(AssertionError, match="0 of 10"):
        before_events.proof(10)
    with pytest.raises(AssertionError, match="no asynchronous scheduling"):
        replayed(fake_engine(async_scheduling=False), 9).proof(10)


# -- comparing -------------------------------------------------------------------------


def made_run(tokens: list[int], logprobs: list[dict[int, float]]) -> Run:
    job = Job("r", [5], len(tokens))
    return Run({"r": Result(job, tokens, logprobs, [])}, 1, 0)


def test_first_differences() -> None:
    stock = made_run(
        [1, 2, 3], [{1: -0.1, 2: -3.0}, {2: -0.2, 4: -0.21}, {3: 0.0, 5: -9.0}]
    )
    ours = made_run(
        [1, 4, 5], [{1: -0.11, 2: -3.0}, {4: -0.2, 2: -0.22}, {5: 0.0, 3: -9.0}]
    )
    found = compare(ours, stock)
    assert (found.same, found.tokens, found.all_tokens) == (0, 1, 3)
    assert found.gap == pytest.approx(0.01) and found.worst == pytest.approx(0.01)
    assert_same(compare(stock, stock))
    with pytest.raises(AssertionError, match="0/1 identical"):
        assert_same(found)


def agreement(gap: float = 0.0, worst: float = 0.0, tokens: int = 90) -> Agreement:
    return Agreement(9, 8, tokens, 100, gap, worst)


def test_what_counts_as_alike() -> None:
    calm = agreement()
    assert_alike(agreement(0.04, 0.02), [calm], "bfloat16")
    assert_alike(agreement(0.002, 0.001), [], "float32")
    assert_alike(agreement(0.3, 0.1), [calm, agreement(worst=0.1)], "bfloat16")
    for bad, noise, dtype in (
        (agreement(gap=0.06), calm, "bfloat16"),
        (agreement(worst=0.021), calm, "bfloat16"),
        (agreement(worst=0.0011), calm, "float32"),
        (agreement(gap=0.0021), calm, "float32"),
        (agreement(tokens=20), calm, "bfloat16"),
        (calm, agreement(worst=0.3), "bfloat16"),
    ):
        with pytest.raises(AssertionError):
            assert_alike(bad, [calm, noise], dtype)


# -- waiting for the device ------------------------------------------------------------


class FakeMode:
    """Stands in for torch.cuda.set_sync_debug_mode; `touch` is what synchronises."""

    def __init__(self) -> None:
        self.mode = "default"

    def __call__(self, mode: str) -> None:
        self.mode = mode

    def touch(self) -> None:
        if self.mode == "warn":
            warnings.warn(syncs.MESSAGE, UserWarning, stacklevel=2)
        if self.mode == "error":
            raise RuntimeError(syncs.MESSAGE)


@pytest.mark.slow
def test_steps_without_waits(tiny_model: Path, checks: Checks) -> None:
    syncs.check_syncs(checks, where(tiny_model), RAGGED, FakeMode())
    found = details(checks)
    assert found["stock"] == "none" and "events in 90" in found[WATCHED]
    assert found['mode "error"'].endswith(" events")


WATCHED = "steps without and with events"


def test_a_wait_in_an_event_is_found(
    tiny_model: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = FakeMode()
    begin = runtime.KVPolicyRuntime.begin

    def begin_and_wait(self: Any, commands: Any, gone: Any) -> None:
        if commands.events:
            mode.touch()
        begin(self, commands, gone)

    monkeypatch.setattr(runtime.KVPolicyRuntime, "begin", begin_and_wait)
    syncs.check_syncs(checks, where(tiny_model), RAGGED, mode)
    failed = {line["check"]: line for line in lines_of(checks.path) if not line["ok"]}
    assert set(failed) == {
        f"{check}{tier}"
        for check in (WATCHED, 'mode "error"')
        for tier in ("", ", own lengths")
    }
    assert (
        "in steps with events: vllm_kvpolicy/worker/worker.py"
        in failed[WATCHED]["detail"]
    )
    assert syncs.MESSAGE in failed['mode "error"']["detail"]
    assert mode.mode == "default"


# -- operations and the command --------------------------------------------------------


def test_operations(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    check_twins(checks, ["reference"], CPU, SMALL_SIZES, SMALL_SIZES)
    assert len(details(checks)) == len(MAKERS)
    operation = operations()["resize"]
    monkeypatch.setattr(
        operation,
        "implementation",
        lambda which: (
            operation.reference
            if which == "reference"
            else lambda **given: ~operation.reference(**given)
        ),
    )
    check_twins(checks, ["triton"], CPU, {}, {"small": SMALL_SIZES["small"]})
    failed = [line["check"] for line in lines_of(checks.path) if not line["ok"]]
    assert "resize, triton" in failed


PROGRAM = """
import json, sys, time
group, path = sys.argv[1:]
def line(name, ok):
    made = {"group": group, "check": name, "ok": ok, "seconds": 1.0, "detail": "d"}
    open(path, "a").write(json.dumps(made) + "\\n")
if group != "empty":
    line("first", True)
if group == "red":
    line("second", False)
if group == "crash":
    sys.exit(3)
if group == "slow":
    time.sleep(60)
"""


def test_groups_that_fail_crash_or_hang(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, path = tmp_path / "program.py", tmp_path / "gpu-check.jsonl"
    program.write_text(PROGRAM)
    run = partial(run_all, command=[sys.executable, str(program)], jobs=5)
    names = ["good", "red", "crash", "slow", "empty"]
    assert not run(names, GRACE_SECONDS + 4, path)
    found = {(line["group"], line["check"]): line for line in lines_of(path)}
    assert found["good", "first"]["ok"] and found["slow", "first"]["ok"]
    assert not found["red", "second"]["ok"] and ("red", "the whole group") not in found
    whole = {group: found[group, "the whole group"]["detail"] for group in names[2:]}
    assert whole["crash"] == "its process ended with status 3"
    assert whole["slow"].startswith("cut off after")
    assert whole["empty"] == "it checked nothing"
    printed = capsys.readouterr().out
    assert printed.count("FAIL") == 4 and "4 checks passed, 4 failed" in printed
    assert not run(["good"], 0, path)
    (late,) = lines_of(path)  # nothing of the run before
    assert late["detail"] == "not begun: out of time" and not late["ok"]
    assert run(["good"], GRACE_SECONDS + 9, path)


def test_processes_of_groups_import_what_tests_share() -> None:
    words = [sys.executable, "-c", "import benchmarks.gpu.check, support.attention"]
    without = {**environment(), "PYTHONPATH": ""}
    assert subprocess.run(words, cwd=ROOT, env=environment()).returncode == 0
    assert subprocess.run(words, cwd=ROOT, env=without).returncode == 1


def test_what_a_gpu_would_check_can_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "--model", "tiny", "--out", str(tmp_path)]
    assert command.main(words) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: would run check_" in printed for name in GROUPS)
