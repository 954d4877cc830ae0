"""Engines whose scheduler is a step ahead of the worker's tokens, as on a GPU.

vLLM's platform for CPUs switches asynchronous scheduling off; see `async_on_cpu`. Its
scheduler, its queue of batches and ours then run as they do there, with a real model.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine.async_on_cpu import allow_async_scheduling
from support.engine.helpers import Engine, Job, Run, make_jobs
from vllm_kvpolicy import compat

VALUES = {"budget": 100, "interval": 40, "prefill_interval": 128}
POLICIES = ("ams-tova",)
LENGTHS = (60, 130, 300, 90, 210, 65)
SMALL_POOL = 22  # superblocks: requests preempt each other


def jobs() -> list[Job]:
    """Return requests that come one after the other; two are aborted at an event."""
    aborted = {1: 70, 4: 1}
    return [
        replace(job, arrives=7 * index, aborted=aborted.get(index))
        for index, job in enumerate(make_jobs(LENGTHS, 130, seed=8))
    ]


def run(model: Path, folder: Path, policy: str, is_async: bool, **sizes: Any) -> Run:
    """Run the jobs; nothing is left of them afterwards."""
    values = {"policy": policy, **VALUES}
    with Engine(model, values, folder, foresees=False, **sizes) as engine:
        assert (engine.core.batch_queue is not None) == is_async
        scheduler = engine.scheduler
        name = f"{type(scheduler).__module__}.{type(scheduler).__name__}"
        assert name == compat.SCHEDULER_CLASSES[is_async]
        given = engine.run(jobs())
        assert len(engine.runtime.requests) == 0
        return given


def ended(run: Run) -> dict[str, Any]:
    """Return the results of jobs that nobody aborted."""
    return {n: r for n, r in run.results.items() if r.job.aborted is None}


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_and_survivors_are_those_of_synchronous_scheduling(
    tiny_model: Path, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With events, preemptions and aborts while the next step is under way."""
    plain = run(tiny_model, tmp_path / "sync", policy, is_async=False)
    allow_async_scheduling(monkeypatch)
    pools = {"async": {}, "small": {"num_blocks": SMALL_POOL}}
    for name, sizes in pools.items():
        found = run(tiny_model, tmp_path / name, policy, is_async=True, **sizes)
        assert (found.preemptions > 0) == (name == "small")
        assert ended(found).keys() == ended(plain).keys()
        for job, result in ended(found).items():
            expected = plain.results[job]
            assert result.tokens == expected.tokens, (name, job)
            assert len(expected.passes[0]) >= 2
            for ours, theirs in zip(
                result.passes[-1], expected.passes[-1], strict=True
            ):
                assert ours.position == theirs.position
                assert np.array_equal(ours.survivors, theirs.survivors), (name, job)
        aborted = [r for r in found.results.values() if r.job.aborted is not None]
        assert all(0 < len(result.tokens) < 130 for result in aborted)
