"""The page in a real browser, with an engine that a test plays."""

import random
import socket
import tempfile
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette

from support.browser import chromium, wait_for
from support.live import event_record, snapshot_record
from vllm_kvpolicy.live.ring import RANK, SCHEDULER, Ring
from vllm_kvpolicy.live.routes import LiveRoutes
from vllm_kvpolicy.metrics import CounterFile

FACTS = {
    "policy": "ams-tova",
    "budget": 64,
    "interval": 32,
    "model": "tiny",
    "block_size": 32,
    "capacity": "A line.",
    "engines": [0],
    "all_engines": 1,
    "versions": {"vllm": "0.32.0", "vllm-kvpolicy": "0.1.0"},
}
KEY = "right"
WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}


class Engine:
    """Plays an engine: 28 layers, 8 heads, some requests that go on."""

    def __init__(self, num_requests):
        self.counters = CounterFile("one", create=True)
        self.scheduler = Ring(SCHEDULER.format("one"), create=True)
        self.rank = Ring(RANK.format("one", 0), create=True)
        self.names = [f"cmpl-{index:03d}-{'f' * 24}" for index in range(num_requests)]
        self.counters.set("local_blocks", 5)
        self.counters.set("global_blocks", 2)
        self.num_steps = self.num_told = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        rng = random.Random(3)
        while not self._end.wait(0.1):
            self.num_steps += 1
            if not self.scheduler.is_heard():
                continue
            self.num_told += 1
            snapshot = snapshot_record(time.monotonic(), self.names)
            for row in snapshot["requests"]:
                row["computed"] += self.num_steps
            self.scheduler.append(snapshot)
            kept = [[rng.randint(40, 90) for _ in range(8)] for _ in range(28)]
            retention = [rng.random() for _ in range(64)]
            changed = {"request": self.names[0], "serial": self.num_steps}
            changed |= {"kept": kept, "age": kept, "retention": retention}
            self.rank.append(event_record(at=time.time(), **changed))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@contextmanager
def serving(port):
    """Serve the routes in a thread."""
    live = LiveRoutes(
        facts=lambda: FACTS,
        engines=lambda: ({0: "one"}, 1),
        pool_blocks=lambda: 30,
        keys=[KEY],
        is_ending=lambda: server.should_exit,
        token_text=None,
    )
    app = Starlette(routes=live.routes())
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/kv_policy/live"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def page_of(browser, width="desk", scheme="light"):
    """Yield a page; the test fails where its script does, or asks another host."""
    wide, tall = WIDTHS[width]
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": wide, "height": tall}
    )
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: is_own(request.url) or wrong.append(request.url))
    yield page
    context.close()
    assert wrong == []


def is_own(url):
    return url.startswith(("http://127.0.0.1:", "data:"))


def unlock(page, url, key=KEY):
    page.goto(f"{url}#key={key}")


def rows(page):
    return page.locator("#rows tr").count()


def pixels(page):
    """Return how many colours the heat map has."""
    return page.evaluate(
        """() => {
            const canvas = document.getElementById("heat");
            const {data} = canvas.getContext("2d").getImageData(
                0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4)
                seen.add(data.slice(i, i + 3).join());
            return seen.size;
        }"""
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_request_is_followed(browser, port, width, scheme):
    with Engine(3), serving(port) as url, page_of(browser, width, scheme) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#strip i').length === 64")
        assert KEY not in page.url
        assert page.inner_text("#title") == "ams-tova"
        assert page.inner_text("#n-running") == "3"
        assert "stock could run 1" in page.inner_text("#s-running")
        assert page.inner_text("#n-pool") == "23 %"
        assert rows(page) == 3
        assert pixels(page) > 20
        before = page.inner_text("#rows tr td:nth-child(3)")
        events = page.inner_text("#rate")
        wait_for(
            page,
            "document.querySelector('#rows tr td:nth-child(3)').textContent !== "
            f"'{before}' && document.getElementById('rate').textContent !== '{events}'",
        )
        # Nothing is wider than the window.
        shown = page.evaluate("document.documentElement.scrollWidth")
        assert shown == WIDTHS[width][0]
        table = page.locator(".scroll")
        assert table.evaluate("node => node.scrollWidth <= node.clientWidth")


def test_a_locked_page_asks_for_the_key(browser, port):
    with Engine(2), serving(port) as url, page_of(browser) as page:
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        wait_for(page, "document.getElementById('refused').textContent !== ''")
        assert rows(page) == 0
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, "document.querySelectorAll('#rows tr').length === 2")


def test_it_works_by_keyboard(browser, port):
    with Engine(3), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#strip i').length === 64")
        page.keyboard.press("Tab")  # the button
        page.keyboard.press("Tab")
        selected = "document.querySelector('[aria-selected=true]').dataset.id"
        assert page.evaluate("document.activeElement.dataset.id") == page.evaluate(
            selected
        )
        first = page.evaluate(selected)
        page.keyboard.press("ArrowDown")
        assert page.evaluate(selected) != first
        page.keyboard.press("Home")
        wait_for(page, "!document.getElementById('detail').hidden")
        page.focus("#heat")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        words = "document.getElementById('cell').innerText"
        wait_for(page, f"{words}.includes('Layer 1, head 0')")
        page.keyboard.press("p")
        time.sleep(0.5)
        before = page.inner_text("#rows")
        time.sleep(0.7)
        assert page.inner_text("#rows") == before
        page.keyboard.press("p")
        wait_for(page, f"document.getElementById('rows').innerText !== {before!r}")


def test_it_survives_a_restart(browser, port):
    with Engine(2), page_of(browser) as page:
        with serving(port) as url:
            unlock(page, url)
            page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#status[data-state=off]")
        with serving(port):
            page.wait_for_selector("#status[data-state=live]")
            page.evaluate("view.requests.clear()")
            wait_for(page, "view.requests.size === 2")


def test_two_hundred_requests_do_not_stall_it(browser, port):
    with Engine(200), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 200")
        slowest = page.evaluate(
            """() => new Promise((done) => {
                const begun = performance.now();
                let last = begun, slowest = 0;
                const frame = (now) => {
                    slowest = Math.max(slowest, now - last);
                    last = now;
                    if (now - begun > 3000) done(slowest);
                    else requestAnimationFrame(frame);
                };
                requestAnimationFrame(frame);
            })"""
        )
        assert slowest < 700  # ms, on a machine that does other things as well


def test_nobody_is_told_once_the_page_is_closed(browser, port, monkeypatch):
    monkeypatch.setattr("vllm_kvpolicy.live.ring.LISTEN_SECONDS", 0.5)
    with Engine(2) as engine, serving(port) as url:
        with page_of(browser) as page:
            unlock(page, url)
            page.wait_for_selector("#status[data-state=live]")
        assert engine.num_told
        deadline = time.monotonic() + 10
        while engine.scheduler.is_heard() and time.monotonic() < deadline:
            time.sleep(0.1)
        told, steps = engine.num_told, engine.num_steps
        time.sleep(0.5)
        assert engine.num_told == told and engine.num_steps > steps
