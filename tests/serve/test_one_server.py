"""`vllm serve --kv-policy NAME`, a server for every name of the package."""

import json
from pathlib import Path

import pytest

from support.calibration_files import options_for
from support.servers.servers import serving
from support.servers.small_server import complete, flags, num_events
from support.sweeps import evictions
from vllm_kvpolicy.policies.names import parse

# Options that fit the short interval.
OPTIONS = {"expected_window": 48, "snapmax_window": 48}
pytestmark = [pytest.mark.serve, pytest.mark.slow]
OUTPUT_TOKENS = 300


@pytest.mark.parametrize("name", [*evictions(), "wgkv+snapkv", "snapkv+quest"])
def test_it_is_served(name: str, tiny_model: Path, tmp_path: Path) -> None:
    read = parse(name).options
    options: dict[str, object] = {k: v for k, v in OPTIONS.items() if k in read}
    options |= options_for(name, tmp_path, 2, 2, 2, 32)
    words = flags(name, 128, 64, kv_policy_config=json.dumps(options))
    with serving(tiny_model, words, tmp_path) as url:
        answer = complete(url, prompt="x" * 90, max_tokens=OUTPUT_TOKENS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
        assert num_events(url) >= 1
