"""Two engines behind one server, and one each in two processes: counters by engine.

The two processes have temporary folders of their own, like two hosts.
"""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from support.browser import chromium, wait_for
from support.servers.servers import command_of, free_port, serving, started
from support.servers.small_server import by_engine, complete, flags
from vllm_kvpolicy.observe.metrics import CounterFile

pytestmark = [pytest.mark.serve, pytest.mark.slow]
POOL_BLOCKS, BLOCK = 25, 32
# A request with events fits the small pool.
FLAGS = flags(
    *("ams-tova", 96, 48),
    additional_config='{"kv_policy": {"prefill_interval": 128}}',
    num_gpu_blocks_override=POOL_BLOCKS,
    data_parallel_size=2,
)
END_SECONDS = 120
FINISHED = "vllm:request_success_total"
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Temporary folder of the server with two engines."""
    return tmp_path_factory.mktemp("two-engines")


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path) -> Iterator[str]:
    """URL of a server with two engines and, by vLLM's default, two API processes."""
    trace = json.dumps({"trace": str(folder / "trace")})
    options = [*FLAGS, "--kv-policy-config", trace, "--kv-live"]
    with serving(tiny_model, options, folder) as url:
        yield url


def complete_many(url: str, count: int) -> int:
    """Send requests of several lengths, eight at once; return the tokens received."""
    rng = random.Random(count)
    sizes = [(rng.randint(1, 150), rng.randint(1, 300)) for _ in range(count)]
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda size: complete(url, prompt="x" * size[0], max_tokens=size[1]), sizes
        )
        return sum(got.json()["usage"]["completion_tokens"] for got in answers)


def wait_until_counted(url: str, requests: int) -> None:
    """Wait until vLLM's own series, which lag, have all requests."""
    deadline = time.monotonic() + 30
    while by_engine(url, FINISHED).total() < requests:
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_both_engines_are_counted_once_by_every_api_process(server: str) -> None:
    tokens = complete_many(server, 40)
    wait_until_counted(server, 40)
    for _ in range(6):
        requests = by_engine(server, "kvpolicy_requests_total")
        assert requests == by_engine(server, FINISHED) and requests.total() == 40
        # A request's step gives a token, or computes a part of its prompt.
        steps = by_engine(server, "kvpolicy_request_steps_total")
        assert by_engine(server, TOKENS) <= steps and steps.total() < tokens + 80
        assert by_engine(server, TOKENS).total() == tokens
        events = by_engine(server, "kvpolicy_events_total")
        assert set(events) == {"0", "1"} and min(events.values()) > 10


def test_each_engine_records_a_trace_of_its_own(server: str, folder: Path) -> None:
    events = by_engine(server, "kvpolicy_events_total")
    runs = {path.name.split("-")[1]: path for path in (folder / "trace").iterdir()}
    recorded = {name: len([*run.glob("*.npz")]) for name, run in runs.items()}
    assert recorded == {f"engine{index}": count for index, count in events.items()}


def test_every_api_process_checks_requests(server: str) -> None:
    for _ in range(6):
        bad = complete(server, vllm_xargs={"kv_budget": 500})
        assert bad.status_code == 400, bad.text
        assert "kv_budget: got 500, expected at most the server's 96" in bad.text
        # More than the pool of one engine, less than those of both.
        long = complete(server, max_tokens=900, vllm_xargs={"kv_policy": "none"})
        assert long.status_code == 400, long.text
        assert f"at most {POOL_BLOCKS - 1}, the size of the pool" in long.text


def test_every_api_process_shows_the_requests_of_both_engines(server: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(complete_many, server, 24)
        running = [Counter[int]() for _ in range(12)]
        for seen in running:
            found = httpx.get(f"{server}/kv_policy/requests", timeout=60).json()
            for state in found["engines"]:
                seen[state["engine"]] = len(state["requests"])
                assert state["pool"]["total"] == POOL_BLOCKS - 1
            assert set(seen) == {0, 1}
        answers.result()
    # Connections go to either process; both know of both engines.
    assert sum(min(seen.values()) > 0 for seen in running) > 6


def test_the_page_shows_both_engines_and_requests_of_each(server: str) -> None:
    seen = "new Set([...document.querySelectorAll('#rows td:first-child')]"
    seen += ".map((cell) => cell.textContent.slice(0, 3)))"
    with chromium() as browser, ThreadPoolExecutor(1) as pool:
        page = browser.new_page()
        page.goto(f"{server}/kv_policy/live")
        page.wait_for_selector("#status[data-state=live]")
        answers = pool.submit(complete_many, server, 48)
        wait_for(page, f"[...{seen}].sort().join() === '0: ,1: '")
        words = [each.inner_text() for each in page.locator(".stock span").all()]
        assert [text[:10] for text in words] == ["engine 0: ", "engine 1: "]
        assert page.inner_text("#size").startswith(f"{2 * (POOL_BLOCKS - 1)} ")
        for engine in (1, 0):  # what heads keep of a request of each
            find = f"[...view.requests.values()].find((r) => r.engine === {engine} &&"
            wait_for(page, f"(view.one = {find} r.events > 0)?.id)?.length > 0")
            chosen = page.evaluate("(choose(view.one, true), view.one)")
            wait_for(page, f"view.detail?.id === '{chosen}' && view.detail.last")
            assert page.evaluate("view.detail.engine") == engine
            assert page.is_visible("#heat") and page.is_visible("#strip")
        answers.result()
        wait_for(page, "document.querySelectorAll('#rows tr').length === 0")


def test_a_killed_engine_ends_the_server_and_leaves_no_file(
    server: str, folder: Path
) -> None:
    """As without a policy, where vLLM stops the server when an engine dies."""
    assert len([*(folder / "tmp").glob("*.counters")]) == 2
    engine = next(
        process
        for process in psutil.Process().children(recursive=True)
        if command_of(process)[:1] == ["VLLM::EngineCore_DP1"]
    )
    main = engine.parent()
    engine.kill()
    main.wait(END_SECONDS)
    assert [*(folder / "tmp").glob("*.counters")] == []


def test_two_processes_over_loopback(tiny_model, tmp_path, monkeypatch) -> None:
    """The second has no HTTP: what its engine counts stays where the engine runs."""
    head, other = tmp_path / "head", tmp_path / "other"
    ranks = ["--data-parallel-size-local", "1", "--data-parallel-address", "127.0.0.1"]
    ranks += ["--data-parallel-rpc-port", str(free_port())]
    headless = ["--headless", "--data-parallel-start-rank", "1"]
    for place in (head, other):
        place.mkdir()
    with (
        started(tiny_model, [*FLAGS, *ranks, *headless], other),
        serving(tiny_model, [*FLAGS, *ranks, "--api-server-count", "1"], head) as url,
    ):
        tokens = complete_many(url, 30)
        wait_until_counted(url, 30)
        monkeypatch.setattr(tempfile, "tempdir", str(other / "tmp"))
        (path,) = (other / "tmp").glob("*.counters")
        name = path.name.removeprefix("vllm-kvpolicy-").removesuffix(".counters")
        remote = CounterFile(name, create=False).read()
        assert by_engine(url, TOKENS).total() == tokens
        finished, here = (
            by_engine(url, name) for name in (FINISHED, "kvpolicy_requests_total")
        )
        assert here == {"0": finished["0"]}
        assert remote["requests"] == finished["1"] > 0
        assert remote["events"] > 10
