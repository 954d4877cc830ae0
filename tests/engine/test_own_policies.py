"""A user's own scorer in an engine with processes and ranks of its own.

Each of them imports it by name; it is `knorm` under another name and gives its tokens.
"""

import os
from pathlib import Path

import pytest

from support.engine.helpers import engine_arguments, make_jobs, read_records
from support.engine.run_multiprocess import run_apart

OWN = """
from vllm_kvpolicy.policies.scorers.knorm import KnormScorer

class Shortest(KnormScorer):
    summary = "keys with the smallest norm"
"""
NAMES = ("adakv-own_policies:Shortest", "adakv-knorm")


@pytest.mark.slow
def test_every_process_imports_it_by_name(tiny_model: Path, tmp_path: Path) -> None:
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
