"""Baselines whose admissions do not look at tokens: `local` and `duo`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine.helpers import Engine, Run, make_jobs
from support.engine.oracle_replay import check_replay
from support.engine.reference_decoder import ReferenceDecoder
from support.made_patterns import write_pattern

LAYERS, HEADS, SIZE, WINDOW, SINKS = 2, 2, 32, 40, 7
BASE = {"interval": 48, "prefill_interval": 128, "recent": WINDOW, "sinks": SINKS}
USE = [[0.9, 0.1], [0.2, 0.7]]


def run(model: Path, trace: Path | None, policy: dict[str, Any] | None) -> Run:
    jobs = make_jobs((40, 300, 170), 120, prompt_logprobs=True)
    asked = None if policy is None else {**BASE, **policy}
    with Engine(model, asked, trace, 40, max_model_len=832) as engine:
        found = engine.run(jobs)
        engine.tell_worker_of_the_last_finish()
        assert engine.num_free == engine.num_usable, "superblocks are lost"
    return found


def kept(found: Run) -> np.ndarray:
    """Return [events, L, H] tokens behind each frontier; replays every request."""
    counts = [
        [(row >= 0).sum(-1) for row in event.survivors]
        for result in found.results.values()
        for event in result.events
    ]
    return np.array(counts)


def frontiers(found: Run) -> np.ndarray:
    """Return [events] frontiers."""
    results = found.results.values()
    return np.array([event.frontier for r in results for event in r.events])


def test_local_keeps_a_page_of_sinks(tiny_model: Path, tmp_path: Path) -> None:
    found = run(tiny_model, tmp_path, {"policy": "local"})
    assert (kept(found) == SIZE).all()
    for result in found.results.values():
        check_replay(ReferenceDecoder(tiny_model), result)
        for event in result.events:
            sinks = set(range(min(SINKS, event.frontier)))
            assert all(sinks <= set(row) for row in event.survivors.reshape(4, -1))


def test_duo_keeps_everything_in_some_heads(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_pattern(tmp_path / "pattern", USE, SINKS, WINDOW)
    options = {"duo_pattern": str(folder)}
    policy = {"policy": "duo", "policy_config": options}
    found = run(tiny_model, tmp_path / "trace", policy)
    counts, whole = kept(found), frontiers(found)
    assert whole.max() > 300
    for layer, head in ((0, 0), (1, 1)):
        assert (counts[:, layer, head] == whole).all()
    for layer, head in ((0, 1), (1, 0)):
        assert (counts[:, layer, head] == SIZE).all()
    for result in found.results.values():
        check_replay(ReferenceDecoder(tiny_model), result)


@pytest.mark.parametrize("sparsity", [0, 1])
def test_the_ends_of_duo(tiny_model: Path, tmp_path: Path, sparsity: int) -> None:
    """Every head retrieves, as dense attention does; or none, as with `local`."""
    folder = write_pattern(tmp_path / "pattern", USE, SINKS, WINDOW)
    options = {"duo_pattern": str(folder), "duo_sparsity": sparsity}
    policy = {"policy": "duo", "policy_config": options}
    found = run(tiny_model, tmp_path / "duo", policy)
    same = {"policy": "local"} if sparsity else None
    other = run(tiny_model, tmp_path / "other", same)
    assert found.tokens == other.tokens
