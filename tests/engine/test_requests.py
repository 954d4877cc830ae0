"""Per-request knobs, protected prompts, and several engines in one process."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engine.helpers import BLOCK, Engine, Session, config_of, make_jobs, serve
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection, inside
from support.made_patterns import write_pattern
from support.sweeps import some

VALUES = {"policy": "snapkv", "budget": 128, "interval": 64, "prefill_interval": 256}
LENGTHS = (60, 200, 350)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory) -> Iterator[Engine]:
    with Engine(tiny_model, VALUES, tmp_path_factory.mktemp("requests")) as engine:
        yield engine


def test_a_smaller_budget_bounds_that_request(engine: Engine, decoder) -> None:
    """Budgets, intervals, recent and sinks of their own, side by side."""
    asked = (
        {"kv_budget": 80},
        {"kv_budget": 96, "kv_interval": 40, "kv_recent": 20, "kv_sinks": 2},
        None,
    )
    jobs = make_jobs(LENGTHS, 140, seed=21)
    jobs = [
        replace(job, extra_args=extra) for job, extra in zip(jobs, asked, strict=True)
    ]
    results = engine.run(jobs).results
    for result, budget in zip(results.values(), (80, 96, 128), strict=True):
        assert result.events
        for event in result.events:
            local = event.position - event.frontier
            num_held = event.survivors.shape[-1] + local
            assert budget <= num_held < budget + BLOCK
            assert event.selected.shape[-1] == event.budget == budget
        config = config_of(VALUES).with_request(result.job.extra_args)
        check_selection(decoder, result, config, BLOCK, Report())
        check_replay(decoder, result)


@pytest.mark.parametrize("events", ["always", "pressure"])
def test_a_share_of_each_request(tiny_model: Path, tmp_path: Path, events: str) -> None:
    """Of prompt and answer limit, by the server's word or by the request's own."""
    values = {**VALUES, "budget": "40%", "events": events}
    jobs = make_jobs((60, 160, 360) * 4, 140, seed=23)
    jobs[1] = replace(jobs[1], extra_args={"kv_budget": "30%"})
    with Engine(tiny_model, values, tmp_path, num_blocks=72) as engine:
        longest = engine.scheduler.max_model_len
        assert engine.scheduler.kv_policy_config.budget_tokens == int(0.4 * longest)
        with pytest.raises(ValueError, match="kv_budget: got '0%', .*such as '25%'"):
            engine.run([replace(jobs[0], extra_args={"kv_budget": "0%"})])
        results = [*engine.run(jobs).results.values()]
    found = [{event.budget for event in result.events} for result in results]
    floors = (80, 90, 200, *(80, 120, 200) * 3)  # of 200, 300 and 500 tokens
    if events == "always":
        assert found == [{floor} for floor in floors]
    assert any(found)
    for budgets, floor in zip(found, floors, strict=True):
        assert min(budgets, default=floor) >= floor


@pytest.mark.parametrize("policy", some(["snapkv", "ams-tova"]))
@pytest.mark.parametrize("pin", ["prompt", 100])
def test_what_is_pinned_stays(
    tiny_model: Path, tmp_path: Path, decoder, policy: str, pin: str | int
) -> None:
    """In its blocks, and what is left of the last one among the survivors."""
    values = {**VALUES, "policy": policy, "pin": pin, "budget": 96}
    values |= {"interval": 40, "report_events": True}
    jobs = make_jobs((50, 130, 310), 190, seed=22)
    for result in serve(tiny_model, values, jobs, tmp_path).results.values():
        assert len(result.events) >= 2
        tokens = min(len(result.job.prompt), 310 if pin == "prompt" else 100)
        whole = tokens // BLOCK * BLOCK
        said = result.output.kv_transfer_params["kv_policy"]
        assert said["pinned"] == whole
        for event in result.events:
            assert (event.pinned, event.budget) == (whole, 96 + tokens - whole)
            assert event.sinks == max(tokens, 4)
            for row in event.survivors.reshape(-1, event.survivors.shape[-1]):
                assert row.min() >= whole
                held = np.r_[row, np.arange(event.frontier, event.position)]
                assert np.isin(np.arange(whole, tokens), held).all()
        check_selection(decoder, result, config_of(values), BLOCK, Report())
        check_replay(decoder, result)


HINTED = {"kv_keep": [40, 50, 90, 96], "kv_drop_first": [120, 180, 900, 910]}


@pytest.mark.parametrize("policy", ["snapkv", "adakv-snapkv", "duo+snapkv"])
def test_hints_say_what_stays_and_what_goes_first(
    tiny_model: Path, tmp_path: Path, decoder, policy: str
) -> None:
    """In every head at every event, and other requests of a batch do not notice."""
    values = {**VALUES, "policy": policy, "budget": 100, "interval": 40, "hints": True}
    if policy.startswith("duo"):  # one head of each layer keeps its text
        path = write_pattern(tmp_path / "duo", [[0.9, 0.1], [0.2, 0.7]], 4, 32)
        values["policy_config"] = {"duo_pattern": str(path), "duo_sparsity": 0.5}
    jobs = make_jobs((310, 310, 200, 310), 120, seed=22)
    asked = [HINTED, {**HINTED, "kv_pin": 70}, {"kv_keep": [0, 190]}, None]
    jobs = [replace(job, extra_args=x) for job, x in zip(jobs, asked, strict=True)]
    with Engine(tiny_model, values, tmp_path) as engine:
        results = engine.run(jobs).results
        alone = engine.run(jobs[-1:]).results["r3"]
    assert results["r3"].tokens == alone.tokens
    config = config_of(values)
    for result in results.values():
        own = config.with_request(result.job.extra_args)
        hints = own.hints_of(len(result.job.prompt), BLOCK)
        said = (result.output.kv_transfer_params or {}).get("kv_policy", {})
        length = len(result.job.prompt) + result.job.max_tokens
        assert said.get("hints") == (hints.said(length) if hints else None)
        whole = own.pinned_tokens(len(result.job.prompt)) // BLOCK * BLOCK
        assert said.get("pinned", 0) == whole
        assert len(result.events) >= 3
        for event in result.events:
            ended = np.arange(event.pinned, event.frontier)
            for row in event.survivors.reshape(-1, event.survivors.shape[-1]):
                dropped = np.setdiff1d(ended, row)
                assert not inside(dropped, hints.keep).any()
                assert not inside(row, hints.drop_first).any()
        if policy == "snapkv":
            check_selection(decoder, result, own, BLOCK, Report())
        check_replay(decoder, result)


def test_engines_in_one_process_do_not_meet(tiny_model: Path, tmp_path: Path) -> None:
    """Two policies and stock vLLM, stepped in turn, give what each gives alone.

    Their counter files go with the engines, while the process goes on.
    """
    policies = (
        None,
        {**VALUES, "policy": "tova", "budget": 96},
        {**VALUES, "policy": "ams-snapkv", "interval": 48},
    )
    engines = [
        Engine(tiny_model, values, tmp_path / str(index) if values else None)
        for index, values in enumerate(policies)
    ]
    files = [each.scheduler.kv_policy_counters.file.path for each in engines[1:]]
    try:
        assert all(path.exists() for path in files)
        jobs = make_jobs(LENGTHS, 100, seed=23)
        alone = [engine.run(jobs) for engine in engines]
        sessions = [Session(engine, jobs) for engine in engines]
        while sum(session.step() for session in sessions):
            pass
        together = [session.finish() for session in sessions]
    finally:
        for engine in engines:
            engine.close()
    assert not any(path.exists() for path in files)
    for first, second in zip(alone, together, strict=True):
        first.check_kept(second)
    longest = [run.results["r2"] for run in alone]
    assert [bool(result.events) for result in longest] == [False, True, True]
    assert len({tuple(result.tokens) for result in longest}) == 3


def test_a_floor_that_the_pool_decides(tiny_model: Path, tmp_path: Path) -> None:
    """Scheduler, check of requests, metrics and events agree on the number."""
    values = {"policy": "snapkv", "budget": "auto", "events": "pressure"}
    values |= {"interval": 64, "prefill_interval": 256}
    sizes = {"num_blocks": 61, "max_num_seqs": 4}
    with Engine(tiny_model, values, tmp_path, **sizes) as engine:
        scheduler = engine.scheduler
        # 15 superblocks each, less a window and 1 for rounding: 416 tokens, less 64.
        assert scheduler.kv_policy_config.budget_tokens == 320
        assert scheduler.kv_policy_counters.read()["floor_tokens"] == 320
        jobs = make_jobs((60, 200, 350, 350), 500, seed=22)
        with pytest.raises(ValueError, match="kv_budget: got 321, .* server's 320"):
            engine.run([replace(jobs[0], extra_args={"kv_budget": 321})])
        jobs[0] = replace(jobs[0], extra_args={"kv_budget": 200})
        jobs[1] = replace(jobs[1], extra_args={"kv_policy": "none"})
        run = engine.run(jobs)
    events = {name: result.events for name, result in run.results.items()}
    assert not events["r1"] and any(events.values())
    lowest = [
        min((event.budget for event in events[f"r{i}"]), default=999) for i in (0, 2, 3)
    ]
    assert lowest[0] >= 200 and min(lowest[1:]) >= 320
