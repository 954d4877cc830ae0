"""One engine on two nodes, a rank on each: two processes that meet over loopback.

They have temporary folders and command lines of their own, like two hosts.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.servers.servers import free_port, serving, started
from support.servers.small_server import complete, flags, num_events
from vllm_kvpolicy.observe.trace_files import read_trace

pytestmark = [pytest.mark.serve, pytest.mark.slow]
OWN = ("kv_policy", "kv_budget", "kv_interval", "kv_events", "kv_policy_config")
STOCK: dict[str, int | None] = dict.fromkeys(OWN)
END_SECONDS = 300


def words(trace: Path, **changes: int | None) -> list[str]:
    """Return arguments of `vllm serve`; `changes` are flags, as of `flags`."""
    told = json.dumps({"trace": str(trace)})
    values = {"kv_policy_config": told, "tensor_parallel_size": 2, **changes}
    return flags("ams-tova", 128, 64, **values)


@contextmanager
def second_node(model: Path, folder: Path, *arguments: str) -> Iterator[list[str]]:
    """Start the node without HTTP; yields what both nodes need to meet."""
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1"]
    meeting += ["--master-port", str(free_port())]
    folder.mkdir()
    own = [*arguments, *meeting, "--node-rank", "1", "--headless"]
    with started(model, own, folder):
        yield [*meeting, "--node-rank", "0"]


def test_two_nodes_serve_what_one_serves(tiny_model: Path, tmp_path: Path) -> None:
    texts, trace = [], tmp_path / "trace"
    for name in ("head", "alone"):
        (tmp_path / name).mkdir()
    with (
        second_node(tiny_model, tmp_path / "other", *words(trace)) as meeting,
        serving(tiny_model, words(trace) + meeting, tmp_path / "head") as url,
    ):
        texts.append(complete(url, prompt="x" * 90).json()["choices"][0]["text"])
        events = num_events(url)
    options = words(tmp_path / "one", tensor_parallel_size=1)
    with serving(tiny_model, options, tmp_path / "alone") as url:
        texts.append(complete(url, prompt="x" * 90).json()["choices"][0]["text"])
    assert texts[0] == texts[1]
    both, alone = list(read_trace(trace)), list(read_trace(tmp_path / "one"))
    assert len(both) == len(alone) == events > 2
    for one, other in zip(both, alone, strict=True):
        assert (one.ranks, other.ranks) == (2, 1)
        assert one.survivors.tolist() == other.survivors.tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"kv_interval": 96}, "ranks [1] have other policies"), (STOCK, "no policy")],
)
def test_nodes_with_other_policies_are_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, int | None], said: str
) -> None:
    head, trace = tmp_path / "head", tmp_path / "trace"
    head.mkdir()
    arguments = words(trace, **changes)
    with (
        second_node(tiny_model, tmp_path / "other", *arguments) as meeting,
        started(tiny_model, words(trace) + meeting, head) as process,
    ):
        assert process.wait(END_SECONDS) != 0
    log = (head / "log").read_text()
    assert said in log, log[-8000:]
