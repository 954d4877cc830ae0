"""A request's survivors depend on that request alone, before and after a preemption."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engine.helpers import (
    POLICIES,
    Engine,
    Job,
    Result,
    Run,
    config_of,
    make_jobs,
    serve,
)
from support.engine.oracle_replay import check_replay
from support.engine.oracle_selection import Report, check_selection
from support.engine.reference_decoder import ReferenceDecoder
from support.sweeps import some

VALUES = {"budget": 110, "interval": 56, "prefill_interval": 256}
LENGTHS = (90, 130, 300)
MAX_SHARE = 1e-3


def rows_that_differ(first: Result, second: Result) -> tuple[int, int]:
    """Compare two runs of one request; return differing rows and all rows."""
    assert first.tokens == second.tokens
    assert len(first.events) == len(second.events) > 0
    differ = total = 0
    for ours, theirs in zip(first.events, second.events, strict=True):
        assert (ours.position, ours.frontier) == (theirs.position, theirs.frontier)
        for name in ("selected", "survivors"):
            unequal = getattr(ours, name) != getattr(theirs, name)
            differ += int(unequal.any(-1).sum())
            total += unequal[..., 0].size
    return differ, total


class Comparison:
    """One set of requests, run in several ways on engines of one policy."""

    def __init__(self, policy: str, model: Path, folder: Path) -> None:
        self.values = {"policy": policy, **VALUES}
        self.jobs = make_jobs(LENGTHS, 90, seed=8)
        with Engine(model, self.values, folder / "whole") as engine:
            self.alone = Run({}, 0, 0)
            for job in self.jobs:
                self.alone.results |= engine.run([job]).results
            self.together = engine.run(self.jobs)
            self.reversed = engine.run(staggered(self.jobs[::-1]))
        chunks = {"trace": folder / "chunks", "max_num_batched_tokens": 72}
        self.chunked = serve(model, self.values, staggered(self.jobs), **chunks)
        self.decoder = ReferenceDecoder(model)

    def check_near_ties(self, run: Run) -> None:
        """Check a run that differs: only where the reference's gap is below 1e-5."""
        config, report = config_of(self.values), Report()
        for result in run.results.values():
            check_selection(self.decoder, result, config, 32, report)


def staggered(jobs: list[Job]) -> list[Job]:
    """Let a job arrive every 17 steps."""
    return [replace(job, arrives=17 * index) for index, job in enumerate(jobs)]


@pytest.fixture(scope="module", params=some(POLICIES))
def comparison(request, tiny_model: Path, tmp_path_factory) -> Comparison:
    folder = tmp_path_factory.mktemp(request.param)
    return Comparison(request.param, tiny_model, folder)


@pytest.mark.parametrize("way", ["together", "reversed", "chunked"])
def test_survivors_depend_on_the_request_alone(comparison, way: str) -> None:
    run = getattr(comparison, way)
    differ = total = 0
    for name, result in run.results.items():
        counts = rows_that_differ(comparison.alone.results[name], result)
        differ, total = differ + counts[0], total + counts[1]
    if differ:
        comparison.check_near_ties(run)
    assert total >= 40
    assert differ <= MAX_SHARE * total


def test_crowded_events_wait_and_do_not_move(tiny_model: Path, tmp_path: Path) -> None:
    """Eight requests want an event in the same step: more than a step carries."""
    # Spread events would not crowd.
    limits = {"events_per_step": 2, "spread_events": False}
    values = {"policy": "snapkv", **VALUES, **limits}
    jobs = make_jobs([100] * 8, 140, seed=15)
    with Engine(tiny_model, values, tmp_path) as engine:
        assert engine.scheduler.kv_policy_limits.events_per_step == 2
        run = engine.run(jobs)
    assert run.steps > jobs[0].max_tokens
    decoder, report = ReferenceDecoder(tiny_model), Report()
    for result in run.results.values():
        check_replay(decoder, result)
        config = config_of(values)
        check_selection(decoder, result, config, 32, report)
    assert report.decisions >= 48
    assert not report.near_ties


REUSE = {"policy": "ams-snapkv", **VALUES}


def test_a_reused_slot_starts_clean(tiny_model: Path, tmp_path: Path) -> None:
    """Credit, windows and tables of earlier requests leave no trace, even if absurd."""
    jobs = make_jobs((180, 75, 330, 120), 100, seed=10)
    with Engine(tiny_model, REUSE, tmp_path / "fresh", max_num_seqs=4) as engine:
        fresh = engine.run(jobs)
    old = make_jobs((70, 200, 310, 90, 160, 280), 100, seed=9)
    old[1], old[4] = replace(old[1], aborted=70), replace(old[4], aborted=90)
    with Engine(tiny_model, REUSE, tmp_path / "used", max_num_seqs=4) as engine:
        engine.run(old)
        assert len(engine.runtime.requests) == 0
        memory = engine.runtime.compactor.memory
        memory.survivors.fill_(1e30)
        memory.local.fill_(1e30)
        pages = engine.runtime.compactor.pool.pages
        pages.fill_(1e30)  # query windows and all others
        engine.runtime.requests.global_blocks[:-1] = 1
        after = engine.run(jobs)
    assert after.tokens == fresh.tokens
    for name, result in after.results.items():
        expected = fresh.results[name]
        assert rows_that_differ(expected, result)[0] == 0
        for ours, theirs in zip(result.logprobs, expected.logprobs, strict=True):
            assert np.allclose(list(ours.values()), list(theirs.values()), atol=1e-4)
