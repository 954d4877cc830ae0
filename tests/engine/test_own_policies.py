"""A user's own scorer in an engine with processes and ranks of its own.

Each of them imports it by name; it is `knorm` under another name and gives its tokens.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine.helpers import engine_arguments, make_jobs, read_records

TESTS = Path(__file__).parents[1]
PROGRAM = "support.engine.run_multiprocess"  # a module, run within TESTS
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
    spec, out = tmp_path / "spec.json", tmp_path / "out.json"
    spec.write_text(json.dumps([asked]))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(spec), str(out)],
        cwd=TESTS,
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(out.read_text())
    assert found["processes"] >= 2 and found["counters"]["events"] >= 4
    assert found["tokens"][0] == found["tokens"][1]
    records = read_records(tmp_path / "trace", set())
    policies = {r.policy for each in records.values() for run in each for r in run}
    assert policies == set(NAMES)
