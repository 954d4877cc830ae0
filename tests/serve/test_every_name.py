"""`vllm serve --kv-policy NAME` for one name per allocator, or for every name.

All names are served one by one where pytest is given `--every-name` (`make test-all`).
"""

import json
from pathlib import Path

import httpx
import pytest

from support.calibration_files import options_for
from support.servers.servers import serving
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.names import names, parse
from vllm_kvpolicy.policies.catalogue.selections import SELECTIONS

pytestmark = pytest.mark.serve
FLAGS = {
    "--kv-budget": "128",
    "--kv-interval": "64",
    "--dtype": "float32",
    "--max-model-len": "1024",
    "--max-num-seqs": "8",
    "--kv-cache-memory-bytes": "8388608",
    "--served-model-name": "tiny",
}
# Options that fit the short interval of this test.
OPTIONS = {"expected_window": 48}
ONE_PER_ALLOCATOR = ("keydiff", "ams-expected", "adakv-snapkv", "pyramid-h2o")
ONE_PER_ALLOCATOR += ("chunk-lagkv", "hard-rkv", "strat-random", "wgkv+snapkv")
ONE_PER_ALLOCATOR += ("snapkv+quest",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Serve every name if asked to."""
    if "name" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--every-name")
    served = [name for name in names() if not parse(name).is_test]
    metafunc.parametrize("name", served if every else ONE_PER_ALLOCATOR)


def test_it_is_served(
    name: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Names of sockets, which vLLM makes in it, have to be short.
    folder = tmp_path_factory.mktemp("serve")
    read = parse(name).options
    options = {key: value for key, value in OPTIONS.items() if key in read}
    options |= calibration(name, tiny_model, folder)
    arguments = [word for flag in FLAGS.items() for word in flag]
    arguments += ["--kv-policy", name, "--enforce-eager"]
    arguments += ["--kv-policy-config", json.dumps(options)]
    body = {"model": "tiny", "prompt": "x" * 90, "max_tokens": 300}
    body |= {"temperature": 0, "ignore_eos": True}
    with serving(tiny_model, arguments, folder) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
    lines = [line for line in metrics.splitlines() if "events_total{" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) >= 1


def calibration(name: str, model: Path, folder: Path) -> dict[str, str]:
    """Return the option that names a calibration file, where a policy needs one."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, size = config["num_hidden_layers"], config["head_dim"]
    return options_for(name, folder, layers, kv_heads, heads // kv_heads, size)


def test_one_name_per_allocator_is_listed() -> None:
    *evictions, admitted, selected = ONE_PER_ALLOCATOR
    allocators = {name.rpartition("-")[0] for name in evictions}
    assert allocators == set(ALLOCATORS)
    assert admitted.partition("+")[0] in ADMISSIONS
    assert selected.rpartition("+")[2] in SELECTIONS
