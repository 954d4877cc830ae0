"""What answers say of their events: what the traces of the same events hold.

And the costs that follow: what the scheduler counts of the same requests.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy.cost import bounded_cost
from support.engine.helpers import (
    BLOCK,
    Engine,
    Result,
    Run,
    footprint_of,
    make_jobs,
    serve,
)
from support.made_gates import make_gates
from vllm_kvpolicy.observe.metrics import CAUSES

WINDOW = 40
BASE = {"budget": 110, "interval": 48, "prefill_interval": 128, "recent": WINDOW}
LENGTHS, TOKENS = (40, 100, 300, 170), 120
TIGHT = {"num_blocks": 22, "max_num_batched_tokens": 96, "max_model_len": 448}


def policy_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the plain form of a policy; gates admit about half of the tokens."""
    options: dict[str, Any] = {}
    if "wgkv" in name:
        path = folder / "gates.safetensors"
        make_gates(2, 2, 32, 6, window=WINDOW, rope_theta=1e4).save(path)
        options = {"wgkv_gates": str(path), "wgkv_threshold": 0.5}
    more = {"policy": name, "policy_config": options, "sinks": 7}
    return {**BASE, **more, "report_events": True, "spread_events": False}


def said_by(run: Run) -> dict[str, dict[str, list[list[float]]]]:
    """Return what the answers said, by name."""
    results = run.results.items()
    return {name: each.output.kv_transfer_params["kv_policy"] for name, each in results}


@pytest.mark.parametrize("name", ["adakv-snapkv", "wgkv+snapkv"])
def test_answers_say_what_traces_hold(name, tiny_model, tmp_path):
    """Preempted, with prompts in chunks, next to each other."""
    policy = policy_of(name, tmp_path)
    pool = {**TIGHT, "foresees": False, "trace": tmp_path / "trace"}
    run = serve(tiny_model, policy, make_jobs(LENGTHS, TOKENS), **pool)
    said = said_by(run)
    assert run.preemptions and len(said) == len(LENGTHS)
    for request, result in run.results.items():
        assert result.passes[-1]
        check_said(said[request], result)
    slack = [each[1] % BLOCK for told in said.values() for each in told["dropped"]]
    assert any(slack) is ("wgkv" in name)
    assert any("before_preemption" in told for told in said.values())


def check_said(told: dict[str, list[list[float]]], result: Result) -> None:
    """Compare what an answer said of its events with what traces hold of them.

    What the last event before a preemption dropped may not have been heard of.
    """
    *earlier, last = result.passes or [[]]
    expected = []
    for event in last:
        kept = (event.survivors >= 0).sum(-1)
        dropped = event.frontier - kept.mean()
        expected.append((event.position, dropped, event.budget))
        assert not (kept % BLOCK).any()
    assert [tuple(each) for each in told["dropped"]] == expected
    before = [(event.position, event.budget) for event in sum(earlier, [])]
    found = told.get("before_preemption", [])
    assert [(position, budget) for position, _, budget in found] == before


def test_under_pressure_answers_say_which_events_they_had_or_that_none(
    tiny_model, tmp_path
):
    """Two alone find room; four beside each other are cut, to levels that differ."""
    floor = 80
    policy = policy_of("tova", tmp_path)
    policy |= {"events": "pressure", "budget": floor, "recent": 16}
    few, many = make_jobs(LENGTHS[:2], 60), make_jobs(LENGTHS, TOKENS, seed=1)
    many = [replace(job, name=f"{job.name} later", arrives=80) for job in many]
    with Engine(tiny_model, policy, tmp_path / "trace", **TIGHT) as engine:
        assert engine.counters()["floor_tokens"] == floor
        assert engine.counters()["level_tokens"] == 0
        run = engine.run([*few, *many])
    said, found = said_by(run), run.counters
    for request, result in run.results.items():
        check_said(said[request], result)
    uncut = [name for name, told in said.items() if told == {"dropped": []}]
    assert {job.name for job in few} <= set(uncut) < set(said)
    assert found["bounded_requests"] == len(said)
    assert found["uncut_requests"] == len(uncut)
    budgets = [each[2] for told in said.values() for each in told["dropped"]]
    assert min(budgets) >= floor < max(budgets)
    assert floor <= found["level_tokens"] <= max(budgets)
    calls = [found[f"called_events_{cause}"] for cause in CAUSES]
    assert 0 < sum(calls) <= found["events"] and not calls[-1]


@pytest.mark.parametrize("name", ["snapkv", "wgkv"])
def test_costs_are_what_the_scheduler_counts(name, tiny_model, tmp_path):
    """But for one block of a request whose event has not been answered yet."""
    policy = policy_of(name, tmp_path)
    jobs = make_jobs(LENGTHS, TOKENS)
    run = serve(tiny_model, policy, jobs)
    said, peaks = said_by(run), 0
    for job in jobs:
        footprint = footprint_of(policy, job)
        assert bool(footprint.window_blocks) is ("snapkv" in name)
        size = len(job.prompt), TOKENS
        dropped = [each[:2] for each in said[job.name]["dropped"]]
        read, peak = bounded_cost(*size, footprint, dropped)
        peaks += peak // BLOCK
        if name == "snapkv":
            assert (read, peak) == bounded_cost(*size, footprint)
            assert peak == BLOCK * footprint.peak_blocks(sum(size) - 1)
        if name == "wgkv":
            assert read < bounded_cost(*size, footprint)[0]
    late = 0 if name == "snapkv" else len(jobs)
    assert peaks <= run.counters["peak_blocks"] <= peaks + late


def test_answers_say_nothing_unless_asked_to(tiny_model, tmp_path):
    policy = {**policy_of("snapkv", tmp_path), "report_events": False}
    (job,) = make_jobs((200,), TOKENS)
    run = serve(tiny_model, policy, [job])
    assert run.counters["events"] > 1
    assert run.results[job.name].output.kv_transfer_params is None
