"""Two servers on one machine share a temporary folder and a trace, and nothing else."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.servers.servers import serving
from vllm_kvpolicy.observe.trace_files import read_trace

pytestmark = [pytest.mark.serve, pytest.mark.slow]
BUDGET, INTERVAL = 96, 48
FLAGS = [
    *("--kv-budget", str(BUDGET), "--kv-interval", str(INTERVAL), "--kv-live"),
    *("--kv-events", "always"),
    *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", "8388608", "--enforce-eager"),
    *("--served-model-name", "tiny"),
]
POLICIES = ("ams-tova", "streaming")


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    yield folder
    shutil.rmtree(folder)


def files(shared: Path) -> set[str]:
    return {path.name for path in shared.glob("vllm-kvpolicy-*")}


def answer(url: str) -> str:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 300, "temperature": 0}
    given = httpx.post(
        f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=120
    )
    assert given.status_code == 200, given.text
    return given.json()["choices"][0]["text"]


def counted(url: str) -> dict[str, int]:
    """Return the events and the observers that are off, as the server tells."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(
        r"^kvpolicy_(events_total|observers_off)\{.*\} (\S+)$", text, re.M
    )
    return {
        name: sum(int(float(value)) for each, value in found if each == name)
        for name in ("events_total", "observers_off")
    }


def test_they_count_apart_and_the_end_of_one_leaves_the_other_whole(
    tiny_model: Path, tmp_path: Path, shared: Path
) -> None:
    trace = tmp_path / "trace"
    options = ["--kv-policy-config", json.dumps({"trace": str(trace)})]
    with ExitStack() as first:
        urls, own = [], []
        stacks = [first, first.enter_context(ExitStack())]
        for policy, stack in zip(POLICIES, stacks, strict=True):
            folder = tmp_path / policy
            folder.mkdir()
            flags = ["--kv-policy", policy, *FLAGS, *options]
            before = files(shared)
            server = serving(tiny_model, flags, folder, shared=shared)
            urls.append(stack.enter_context(server))
            assert before < files(shared)
            own.append(files(shared) - before)
        assert [len(names) for names in own] == [3, 3]  # counters, scheduler, worker
        one, other = urls
        texts = [answer(one), answer(one)]
        assert texts[0] == texts[1]
        events = counted(one)["events_total"]
        assert events >= 6 and counted(other)["events_total"] == 0
        answer(other)
        assert counted(one)["events_total"] == events
        others = counted(other)["events_total"]
        assert others >= 3
        stacks[1].close()
        assert files(shared) == own[0]
        assert answer(one) == texts[0]
        events += events // 2
        assert counted(one) == {"events_total": events, "observers_off": 0}
    assert files(shared) == set()
    runs = {run: list(read_trace(run)) for run in trace.iterdir()}
    of_policies = {run[0].policy: len(run) for run in runs.values()}
    assert of_policies == {"ams-tova": events, "streaming": others}
    assert all(len({event.policy for event in run}) == 1 for run in runs.values())
