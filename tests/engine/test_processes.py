"""API process, engine and worker apart give what one process gives.

Everything that a policy needs then travels in messages; a user's own scorer is imported
by name in each of them.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from support.engine.helpers import engine_arguments, make_jobs, read_records, serve
from support.engine.run_multiprocess import run_apart

VALUES = {"budget": 110, "interval": 40, "prefill_interval": 256}
POLICIES = ("identity", "ams-snapkv")
JOBS = make_jobs((40, 150, 300, 600), 200, seed=40)
# `knorm` under another name.
OWN = """
from vllm_kvpolicy.policies.scorers.knorm import KnormScorer

class Shortest(KnormScorer):
    summary = "keys with the smallest norm"
"""
NAMES = ("adakv-own_policies:Shortest", "adakv-knorm")
pytestmark = pytest.mark.slow


def test_answers_and_survivors_do_not_depend_on_processes(
    tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [job.prompt for job in JOBS]
    values = [{"policy": name, **VALUES} for name in POLICIES]
    specs = [
        {
            "arguments": engine_arguments(tiny_model, each, tmp_path / each["policy"]),
            "prompts": prompts,
            "max_tokens": JOBS[0].max_tokens,
        }
        for each in values
    ]
    identity, ams = run_apart(specs, tmp_path)
    for found in (identity, ams):
        assert found["processes"] >= 2 and found["counters"]["events"] >= 15
    stock = serve(tiny_model, None, JOBS)
    assert identity["tokens"] == list(stock.tokens.values())
    assert identity["counters"]["tokens_dropped"] == 0
    expected = serve(tiny_model, values[1], JOBS, tmp_path / "one")
    assert ams["tokens"] == list(expected.tokens.values())
    passes = read_records(tmp_path / POLICIES[1], set())
    # vLLM numbers offline requests in their order.
    by_order = sorted(passes, key=lambda name: int(name.partition("-")[0]))
    for request_id, result in zip(by_order, expected.results.values(), strict=True):
        (events,) = passes[request_id]
        for ours, theirs in zip(events, result.events, strict=True):
            assert ours.position == theirs.position
            assert np.array_equal(ours.survivors, theirs.survivors)
            assert np.array_equal(ours.selected, theirs.selected)
    assert len(expected.events) >= 15


def test_every_process_imports_a_scorer_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    """With ranks of its own."""
    (tmp_path / "own_policies.py").write_text(OWN)
    (job,) = make_jobs((300,), 100, seed=7)
    values = {"policy": NAMES[0], "allow": [NAMES[1]], "budget": 110, "interval": 40}
    asked = {
        "arguments": engine_arguments(
            tiny_model, values, tmp_path / "trace", tensor_parallel_size=2
        ),
        "prompts": [job.prompt] * len(NAMES),
        "max_tokens": job.max_tokens,
        "extra_args": [{"kv_policy": name} for name in NAMES],
    }
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    (found,) = run_apart([asked], tmp_path, PYTHONPATH=path)
    assert found["processes"] >= 2 and found["counters"]["events"] >= 4
    assert found["tokens"][0] == found["tokens"][1]
    records = read_records(tmp_path / "trace", set())
    policies = {r.policy for each in records.values() for run in each for r in run}
    assert policies == set(NAMES)
