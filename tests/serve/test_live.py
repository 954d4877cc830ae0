"""The live routes and the page of a real server, with an API key and a restart."""

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import psutil
import pytest

from support.browser import chromium, wait_for
from support.servers.servers import command_of, free_port, serving
from support.servers.shared_server import BLOCK, BUDGET, HEADERS, INTERVAL, KEY
from support.servers.small_server import flags
from support.stalled import open_stalled_stream
from support.waiting import wait_until

pytestmark = pytest.mark.serve
POLICIES = ("ams-tova", "streaming", "none")
OPTIONS = '{"allow": ["streaming"]}'
ARGUMENTS = flags("ams-tova", BUDGET, INTERVAL, api_key=KEY, kv_policy_config=OPTIONS)
ARGUMENTS += ["--kv-live", "--max-model-len", "2048"]
END_SECONDS = 90  # that a server may take to end, on a busy machine
PROMPT = "a word that stays in the server"


class Server:
    """A server that can be restarted on its port."""

    def __init__(self, model, folder):
        self.model, self.folder, self.port = model, folder, free_port()
        self.num_starts, self.is_up = 0, False
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        self.num_starts += 1
        folder = self.folder / str(self.num_starts)
        folder.mkdir()
        self._running = serving(self.model, ARGUMENTS, folder, self.port)
        self._running.__enter__()
        self.is_up = True

    def stop(self, sign=signal.SIGINT):
        """End the server; return the seconds that it took."""
        (process,) = (
            each
            for each in psutil.Process().children()
            if str(self.port) in command_of(each)
        )
        begun = time.monotonic()
        process.send_signal(sign)
        psutil.wait_procs([process], END_SECONDS)
        took = time.monotonic() - begun
        self._running.__exit__(None, None, None)
        self.is_up = False
        return took

    def files(self):
        """Return counters, the scheduler's ring and the worker's."""
        folder = self.folder / str(self.num_starts) / "tmp"
        return list(folder.glob("vllm-kvpolicy-*"))


@pytest.fixture
def own_server(tiny_model, tmp_path_factory):
    server = Server(tiny_model, tmp_path_factory.mktemp("live"))
    server.start()
    yield server
    if server.is_up:
        server.stop()


def get(server, path=""):
    return httpx.get(f"{server}/kv_policy{path}", headers=HEADERS, timeout=60)


def ask(server, policy, tokens=1200):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens}
    body |= {"ignore_eos": True, "vllm_xargs": {"kv_policy": policy}}
    answer = httpx.post(
        f"{server}/v1/completions", json=body, headers=HEADERS, timeout=300
    )
    assert answer.status_code == 200, answer.text


@contextmanager
def going_on(server, *policies):
    """Send a request of each policy, and another one after it, until the block ends."""
    is_over = threading.Event()

    def send(policy):
        while not is_over.is_set():
            ask(server, policy)

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(send, policy) for policy in policies]
        try:
            yield
        finally:
            is_over.set()
    for answer in answers:
        answer.result()


def state(server):
    """Return the rows of running requests by policy, and the pool at that time."""
    (found,) = get(server, "/requests").json()["engines"]
    return {row["policy"]: row for row in found["requests"]}, found["pool"]


def state_with_events(server):
    """Return the state once all requests run, and have had events if they can."""
    rows, pool = state(server)
    if len(rows) < 3 or min(rows[name]["events"] for name in POLICIES[:2]) < 3:
        return None
    return rows, pool


@pytest.mark.parametrize("path", ["", "/requests", "/requests/x", "/stream"])
def test_data_asks_for_the_servers_key(shared_server, path):
    assert httpx.get(f"{shared_server}/kv_policy{path}").status_code == 401


def test_the_overview_says_what_runs(shared_server):
    found = get(shared_server).json()
    assert (found["policy"], found["budget"]) == ("ams-tova", BUDGET)
    assert "fits" in found["capacity"] and found["block_size"] == BLOCK
    assert found["events"] == "always"
    assert found["versions"]["vllm"].startswith("0.32") and found["kernels"]
    assert any("vLLM" in feature for feature in found["refused"])


def test_three_policies_are_followed_and_no_text_leaves(shared_server):
    said = []

    def listen():
        url = f"{shared_server}/kv_policy/stream"
        with httpx.stream("GET", url, headers=HEADERS, timeout=60) as answer:
            for line in answer.iter_lines():
                said.append(line)
                if ended.is_set() and not line:  # between two messages
                    break

    ended = threading.Event()
    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: said)
    with going_on(shared_server, *POLICIES):
        found, pool_now = wait_until(lambda: state_with_events(shared_server))
        detail = get(shared_server, f"/requests/{found['ams-tova']['id']}").json()
    assert found["none"]["held"] == found["none"]["computed"]
    assert found["none"]["uncut"] and found["none"]["floor"] is None
    for name in ("ams-tova", "streaming"):
        row = found[name]
        assert row["held"] < row["computed"] and row["returned"] > 0
        assert not row["uncut"]
        assert row["blocks"] < -(-row["computed"] // BLOCK)
    assert pool_now["stock"] > pool_now["local"] + pool_now["global"] > 0
    last = detail["last"]
    assert len(last["kept"]) == len(last["kept"][0]) == 2
    heads = [count for layer in last["kept"] for count in layer]
    assert min(heads) >= BUDGET and max(heads) < BUDGET + BLOCK
    kept = sum(last["retention"]) / 64 * last["position"]
    assert kept == pytest.approx(sum(heads) / 4, abs=4)
    assert last["retention"][-1] == 1 and last["first_known"] == 0
    wait_until(lambda: state(shared_server)[0] == {})
    ended.set()
    listener.join()
    events = [
        json.loads(said[i + 1][6:]) for i, x in enumerate(said) if x == "event: event"
    ]
    ordinals = [e["ordinal"] for e in events if e["request"] == detail["id"]]
    assert ordinals == list(range(len(ordinals))) and len(ordinals) >= 6
    # An open stream is no long request of vLLM's series.
    measured = httpx.get(f"{shared_server}/metrics", headers=HEADERS).text
    assert 'handler="/kv_policy/requests"' in measured
    assert 'handler="/kv_policy/stream"' not in measured
    everything = "".join(said) + json.dumps(detail)
    assert PROMPT not in everything and "share" not in detail["last"]
    assert "tokens" not in detail and "ids" not in detail


@pytest.mark.slow
def test_the_page_asks_for_the_key_follows_requests_and_survives_a_restart(own_server):
    """While other clients have opened streams that they never read."""
    with chromium() as browser, open_stalled_stream(own_server.port, KEY):
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{own_server.url}/kv_policy/live")
        unlock(page)
        follow_three(own_server.url, page)
        assert len(own_server.files()) == 3
        assert own_server.stop() < END_SECONDS
        page.wait_for_selector("#status[data-state=off]", timeout=180_000)
        own_server.start()
        page.wait_for_selector("#status[data-state=live]", timeout=180_000)
        with open_stalled_stream(own_server.port, KEY):
            follow_three(own_server.url, page)
            assert own_server.stop(signal.SIGTERM) < END_SECONDS


def unlock(page):
    """Type a wrong key, then the right one."""
    page.wait_for_selector("#door:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    wait_for(page, "document.getElementById('refused').textContent !== ''")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")


def follow_three(server, page):
    """See rows, heads, strip, pool and events of three requests move.

    The one without events comes first, which does not keep the page from the others.
    """
    rows, rate = "document.querySelectorAll('#rows tr')", "$('rate').textContent"
    with going_on(server, POLICIES[-1]):
        wait_for(page, f"{rows}.length === 1")
        with going_on(server, *POLICIES[:-1]):
            cells = f"[...{rows}].map((row) => row.children[1].firstChild.textContent)"
            wait_for(page, f"{cells}.sort().join() === {','.join(sorted(POLICIES))!r}")
            wait_for(page, "view.requests.has(view.detail?.id) && view.detail.last")
            strip = page.inner_html("#strip")
            assert page.evaluate("$('strip').children.length") == 64
            wait_for(page, f"$('strip').innerHTML !== {strip!r}")
            wait_for(page, f"parseInt({rate}) >= 3")
            wait_for(page, "document.querySelector('.bar .global').clientWidth > 0")
            assert page.is_visible("#heat") and page.inner_text("#cell")
    wait_for(page, f"{rows}.length === 0")
