"""Two servers on one machine share a temporary folder and a trace, and nothing else."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.servers.servers import serving
from support.servers.small_server import by_engine, complete, flags, num_events
from vllm_kvpolicy.observe.trace_files import read_trace

pytestmark = [pytest.mark.serve, pytest.mark.slow]
POLICIES = ("ams-tova", "streaming")


@pytest.fixture
def shared() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kv"))
    yield folder
    shutil.rmtree(folder)


def files(shared: Path) -> set[str]:
    return {path.name for path in shared.glob("vllm-kvpolicy-*")}


def answer(url: str) -> str:
    given = complete(url, prompt="hello")
    assert given.status_code == 200, given.text
    return given.json()["choices"][0]["text"]


def test_they_count_apart_and_the_end_of_one_leaves_the_other_whole(
    tiny_model: Path, tmp_path: Path, shared: Path
) -> None:
    trace = tmp_path / "trace"
    options = json.dumps({"trace": str(trace)})
    with ExitStack() as first:
        urls, own = [], []
        stacks = [first, first.enter_context(ExitStack())]
        for policy, stack in zip(POLICIES, stacks, strict=True):
            folder = tmp_path / policy
            folder.mkdir()
            words = flags(policy, 96, 48, kv_policy_config=options)
            before = files(shared)
            server = serving(tiny_model, [*words, "--kv-live"], folder, shared=shared)
            urls.append(stack.enter_context(server))
            assert before < files(shared)
            own.append(files(shared) - before)
        assert [len(names) for names in own] == [3, 3]  # counters, scheduler, worker
        one, other = urls
        texts = [answer(one), answer(one)]
        assert texts[0] == texts[1]
        events = num_events(one)
        assert events >= 6 and num_events(other) == 0
        answer(other)
        assert num_events(one) == events
        others = num_events(other)
        assert others >= 3
        stacks[1].close()
        assert files(shared) == own[0]
        assert answer(one) == texts[0]
        events += events // 2
        assert num_events(one) == events
        assert by_engine(one, "kvpolicy_observers_off").total() == 0
    assert files(shared) == set()
    runs = {run: list(read_trace(run)) for run in trace.iterdir()}
    of_policies = {run[0].policy: len(run) for run in runs.values()}
    assert of_policies == {"ams-tova": events, "streaming": others}
    assert all(len({event.policy for event in run}) == 1 for run in runs.values())
