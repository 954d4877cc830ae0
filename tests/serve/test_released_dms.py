"""The documented command serves a folder of the released DMS checkpoint's shape."""

from pathlib import Path

import httpx
import pytest

from support.made_checkpoints import make_released_dms
from support.servers.servers import serving
from support.servers.small_server import by_engine

pytestmark = [pytest.mark.serve, pytest.mark.slow]
# Of docs/dms.md; the rest is for a small machine.
COMMAND = ["--kv-policy", "dms", "--kv-recent", "512", "--kv-sinks", "0"]
SMALL = ["--enforce-eager", "--kv-cache-memory-bytes", "8388608", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_released_dms(tmp_path_factory.mktemp("released") / "model")


def test_it_answers_and_drops_tokens(
    folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    arguments = [*COMMAND, *SMALL, "--tokenizer", str(tiny_model)]
    body = {
        "model": str(folder),
        "messages": [{"role": "user", "content": "a needle in hay " * 80}],
        "max_tokens": 600,
        "ignore_eos": True,
    }
    with serving(folder, arguments, tmp_path) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        dropped = by_engine(url, "kvpolicy_tokens_dropped_total").total()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 1200
    assert answer.json()["usage"]["completion_tokens"] == 600
    assert dropped > 0


def test_without_a_tokenizer_it_says_which_one(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(pytest.fail.Exception) as failure,
        serving(folder, [*COMMAND, *SMALL], tmp_path),
    ):
        pass
    last = str(failure.value).strip().splitlines()[-1]
    assert last == (
        f"error: dms: {folder} has no tokenizer; set --tokenizer to the model that "
        "this one was made from, for nvidia/Qwen3-8B-DMS-8x --tokenizer Qwen/Qwen3-8B"
    )
