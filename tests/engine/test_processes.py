"""API process, engine and worker apart give what one process gives.

Everything that a policy needs then travels in messages.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine.helpers import (
    Run,
    engine_arguments,
    make_jobs,
    read_records,
    serve,
)
from support.engine.run_multiprocess import run_apart

VALUES = {"budget": 110, "interval": 40, "prefill_interval": 256}
POLICIES = ("identity", "ams-snapkv")
JOBS = make_jobs((40, 150, 300, 600), 200, seed=40)


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> dict[str, Path]:
    """Where the engines in other processes record their events."""
    return {name: tmp_path_factory.mktemp(name) for name in POLICIES}


@pytest.fixture(scope="module")
def apart(tiny_model: Path, tmp_path_factory, traces) -> dict[str, dict[str, Any]]:
    """What each policy gives with several processes."""
    folder = tmp_path_factory.mktemp("apart")
    prompts = [job.prompt for job in JOBS]
    specs = []
    for name in POLICIES:
        values = {"policy": name, **VALUES}
        arguments = engine_arguments(tiny_model, values, traces[name])
        fields = {"prompts": prompts, "max_tokens": JOBS[0].max_tokens}
        specs.append({"arguments": arguments, **fields})
    return dict(zip(POLICIES, run_apart(specs, folder), strict=True))


@pytest.fixture(scope="module")
def one_process(tiny_model: Path, tmp_path_factory) -> dict[str | None, Run]:
    """What each policy, and stock vLLM, gives in this process."""
    runs = {}
    for name in (None, "ams-snapkv"):
        values = name and {"policy": name, **VALUES}
        trace = tmp_path_factory.mktemp("one") if name else None
        runs[name] = serve(tiny_model, values, JOBS, trace)
    return runs


@pytest.mark.slow
def test_there_are_several_processes(apart) -> None:
    for found in apart.values():
        assert found["processes"] >= 2
        assert found["counters"]["events"] >= 15


@pytest.mark.slow
def test_identity_is_stock(apart, one_process) -> None:
    assert apart["identity"]["tokens"] == list(one_process[None].tokens.values())
    assert apart["identity"]["counters"]["tokens_dropped"] == 0


@pytest.mark.slow
def test_survivors_do_not_depend_on_processes(apart, one_process, traces) -> None:
    expected = one_process["ams-snapkv"].results
    assert apart["ams-snapkv"]["tokens"] == list(
        one_process["ams-snapkv"].tokens.values()
    )
    passes = read_records(traces["ams-snapkv"], set())
    # vLLM numbers offline requests in their order.
    by_order = sorted(passes, key=lambda name: int(name.partition("-")[0]))
    compared = 0
    for request_id, result in zip(by_order, expected.values(), strict=True):
        (events,) = passes[request_id]
        for ours, theirs in zip(events, result.events, strict=True):
            assert ours.position == theirs.position
            assert np.array_equal(ours.survivors, theirs.survivors)
            assert np.array_equal(ours.selected, theirs.selected)
            compared += 1
    assert compared >= 15
