"""Trace, live page and counters die under load: answers stay, and each is told once."""

import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine.helpers import Engine, make_jobs
from vllm_kvpolicy.observe.metrics import Collector
from vllm_kvpolicy.observe.shared_files import RANK, SCHEDULER, Ring, own_engine
from vllm_kvpolicy.observe.snapshots import PERIOD_SECONDS

VALUES = {"policy": "ams-tova", "budget": 100, "interval": 40, "live": True}
JOBS = make_jobs((60, 130, 200, 90), 150, seed=3)
DIES_AT = 60  # steps


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(tiny_model, VALUES, tmp_path / "trace") as engine:
        yield engine


class Broken:
    """What an observer meets when its disk is gone."""

    def __call__(self, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")


def off(engine: Engine, missed: set[str]) -> dict[str, float]:
    """Return what a scrape tells of observers."""
    collector = Collector({0: own_engine(engine.scheduler.vllm_config)}, "t", missed)
    return {
        sample.labels["observer"]: sample.value
        for family in collector.collect()
        for sample in family.samples
        if family.name == "kvpolicy_observers_off"
    }


@pytest.mark.parametrize("live", ["worker", "scheduler"])
def test_observers_that_die_are_told_and_nothing_else_changes(
    engine: Engine,
    live: str,
    policy_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = own_engine(engine.scheduler.vllm_config)
    rings = [
        Ring(each, create=False)
        for each in (SCHEDULER.format(name), RANK.format(name, 0))
    ]
    compactor = engine.runtime.compactor
    observers = {
        "worker": (compactor.live, "_summary", "LiveEvents"),
        "scheduler": (engine.scheduler.kv_policy_snapshots, "_look", "Snapshots"),
    }
    expected = engine.run(JOBS).tokens
    missed: set[str] = set()
    assert off(engine, missed) == {"trace": 0, "live": 0, "counters": 0}
    policy_log.clear()
    steps = 0

    def step(engine: Engine) -> None:
        nonlocal steps
        steps += 1
        for ring in rings:
            ring.listen()
        if steps == DIES_AT:
            shutil.rmtree(compactor.trace.directory)
            owner, method, _ = observers[live]
            monkeypatch.setattr(owner, method, Broken())
            time.sleep(PERIOD_SECONDS)  # after which the next snapshot is due
        if steps == 2 * DIES_AT:
            assert off(engine, missed) == {"trace": 1, "live": 1, "counters": 0}
            engine.scheduler.kv_policy_counters.file.path.unlink()

    engine.trace = None  # its records are gone
    found = engine.run(JOBS, step).tokens
    assert steps > 2 * DIES_AT and found == expected
    for _ in range(3):
        assert off(engine, missed) == {"counters": 1}
    told = sorted(record.getMessage() for record in policy_log.records)
    assert len(told) == 3
    assert told[0] == f"{observers[live][2]} is off from here on; serving goes on"
    assert told[1].startswith("cannot read ") and told[1].endswith("at /metrics")
    assert told[2].startswith("cannot write to the trace in ")
