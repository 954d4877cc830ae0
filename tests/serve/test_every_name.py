"""`vllm serve --kv-policy NAME` for every name of the package, a server each."""

import json
from pathlib import Path

import httpx
import pytest

from support.servers.names_served import (
    FLAGS,
    ONE_PER_ALLOCATOR,
    calibration,
    options_of,
)
from support.servers.servers import serving
from support.sweeps import evictions
from vllm_kvpolicy.policies.names import ADMISSIONS, ALLOCATORS, SELECTIONS

pytestmark = pytest.mark.serve


@pytest.mark.slow
@pytest.mark.parametrize("name", evictions())
def test_it_is_served(name: str, tiny_model: Path, tmp_path: Path) -> None:
    options = options_of([name]) | calibration(name, tiny_model, tmp_path)
    arguments = [word for flag in FLAGS.items() for word in flag]
    arguments += ["--kv-policy", name, "--enforce-eager"]
    arguments += ["--kv-policy-config", json.dumps(options)]
    body = {"model": "tiny", "prompt": "x" * 90, "max_tokens": 300}
    body |= {"temperature": 0, "ignore_eos": True}
    with serving(tiny_model, arguments, tmp_path) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
    lines = [line for line in metrics.splitlines() if "events_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) >= 1


def test_one_name_per_allocator_is_listed() -> None:
    *evictions, admitted, selected = ONE_PER_ALLOCATOR
    allocators = {name.rpartition("-")[0] for name in evictions}
    assert allocators == set(ALLOCATORS)
    assert admitted.partition("+")[0] in ADMISSIONS
    assert selected.rpartition("+")[2] in SELECTIONS
