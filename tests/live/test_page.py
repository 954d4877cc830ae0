"""The page in a real browser, with an engine that a test plays."""

import tempfile
import time
from contextlib import contextmanager

import pytest

from support.browser import chromium, faint_texts, wait_for
from support.live import KEY, PlayedEngine, serving_routes
from support.servers.servers import free_port

WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def port():
    return free_port()


@contextmanager
def serving(port):
    """Serve the routes; yields the page's URL."""
    with serving_routes(port, token_text=lambda token: f"{token} "):
        yield f"http://127.0.0.1:{port}/kv_policy/live"


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
    with PlayedEngine(3), serving(port) as url, page_of(browser, width, scheme) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#strip i').length === 64")
        assert KEY not in page.url
        assert page.inner_text("#title") == "ams-tova"
        assert page.inner_text("#n-running") == "3"
        assert page.inner_text("#o-running") == "stock could run 1"
        assert page.inner_text("#n-pool") == "23 %"
        assert rows(page) == 3
        policy = page.locator("#rows td:nth-child(2)").first
        assert policy.inner_text().split("\n") == ["ams-tova", "64 / 32"]
        assert policy.evaluate("node => node.scrollWidth <= node.clientWidth")
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
    with PlayedEngine(2), serving(port) as url, page_of(browser) as page:
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        wait_for(page, "document.getElementById('refused').textContent !== ''")
        assert rows(page) == 0
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, "document.querySelectorAll('#rows tr').length === 2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_of_wcag_aa(browser, port, scheme):
    """With tokens of every share of heads, and the field for the key."""
    with (
        PlayedEngine(3),
        serving(port) as url,
        page_of(browser, "desk", scheme) as page,
    ):
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        assert faint_texts(page) == []
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, "document.querySelectorAll('#text span').length === 100")
        colours = "new Set([...$('text').children].map((s) => s.style.color)).size"
        assert page.evaluate(colours) == 2
        assert faint_texts(page) == []


def test_without_requests_it_says_so(browser, port):
    with PlayedEngine(0), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        page.wait_for_selector("#status[data-state=live]")
        wait_for(page, "document.getElementById('n-running').innerText === '0'")
        assert page.inner_text("#n-pool") == "0 %"
        assert page.is_visible("#empty") and page.is_visible("#nothing")
        assert page.inner_text("#rate") == "0 events"


def test_the_tab_key_reaches_all_controls_and_shows_where_it_is(browser, port):
    with PlayedEngine(3), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#text span').length === 100")
        reached = []
        for _ in range(6):
            page.keyboard.press("Tab")
            name, style, width = page.evaluate(
                """() => {
                    const node = document.activeElement, style = getComputedStyle(node);
                    return [node.id || node.tagName, style.outlineStyle,
                            parseFloat(style.outlineWidth)];
                }"""
            )
            assert style == "solid" and width >= 2, name
            reached.append(name)
        assert reached == ["pause", "TR", "by-kept", "by-age", "heat", "text"]
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.id") == "heat"


SELECTED = "document.querySelector('[aria-selected=true]')?.dataset.id"


def test_it_works_by_keyboard(browser, port):
    with PlayedEngine(3), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#strip i').length === 64")
        page.keyboard.press("Tab")  # the button
        page.keyboard.press("Tab")
        first = page.evaluate(SELECTED)
        assert page.evaluate("document.activeElement.dataset.id") == first
        page.keyboard.press("ArrowDown")
        assert page.evaluate(SELECTED) != first
        page.keyboard.press("Escape")  # back to the page's own choice
        wait_for(page, f"{SELECTED} === '{first}'")
        wait_for(page, "!document.getElementById('detail').hidden")
        page.focus("#heat")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        words = "document.getElementById('cell').innerText"
        wait_for(page, f"{words}.includes('Layer 1, head 0')")
        page.keyboard.press("Escape")
        wait_for(page, f"!{words}.includes('Layer')")
        page.keyboard.press("p")
        time.sleep(0.5)
        before = page.inner_text("#rows")
        time.sleep(0.7)
        assert page.inner_text("#rows") == before
        page.keyboard.press("p")
        wait_for(page, f"document.getElementById('rows').innerText !== {before!r}")


def test_it_survives_a_restart(browser, port):
    with PlayedEngine(2), page_of(browser) as page:
        with serving(port) as url:
            unlock(page, url)
            page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#status[data-state=off]")
        with serving(port):
            page.wait_for_selector("#status[data-state=live]")
            page.evaluate("view.requests.clear()")
            wait_for(page, "view.requests.size === 2")


CHOSEN_LAST = """() => {
    const drawn = [], fill = CanvasRenderingContext2D.prototype.fillRect;
    CanvasRenderingContext2D.prototype.fillRect = function (...place) {
        if (this.canvas.id === "events") drawn.push(this.fillStyle);
        return fill.apply(this, place);
    };
    const [chosen, other] = view.requests.keys();
    view.selected = chosen;
    view.lines = [chosen, other, chosen, other].map((request) => (
        {kind: "event", at: Date.now() / 1000 + view.skew, request, held: 9, kept: 5}));
    showEvents();
    CanvasRenderingContext2D.prototype.fillRect = fill;
    return drawn;
}"""


def test_events_of_the_chosen_request_are_drawn_over_the_others(browser, port):
    with PlayedEngine(2), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 2")
        drawn = page.evaluate(CHOSEN_LAST)
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
        assert drawn[3] == page.evaluate("ink('--s4')")


DIAMOND = """() => {
    const pen = CanvasRenderingContext2D.prototype, own = {};
    for (const name of ["moveTo", "lineTo", "fill"]) own[name] = pen[name];
    let path = [], filled = [];
    pen.moveTo = function (...at) { path = [at]; own.moveTo.apply(this, at); };
    pen.lineTo = function (...at) { path.push(at); own.lineTo.apply(this, at); };
    pen.fill = function () { filled = [this.fillStyle, ...path]; own.fill.call(this); };
    view.lines = [{kind: "preemption", at: Date.now() / 1000 + view.skew - 30}];
    showEvents();
    Object.assign(pen, own);
    return filled;
}"""
LEGEND = """() => {
    const mark = document.querySelector(".legend .diamond");
    const {width, height} = mark.getBoundingClientRect();
    return [width, height, getComputedStyle(mark).clipPath];
}"""


def test_the_legends_mark_of_a_preemption_is_the_drawn_one(browser, port):
    with PlayedEngine(2), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 2")
        colour, *points = page.evaluate(DIAMOND)
        assert colour == page.evaluate("ink('--alert')")
        left, top = (min(point[axis] for point in points) for axis in (0, 1))
        width, height, shape = page.evaluate(LEGEND)
        drawn = [((x - left) / width, (y - top) / height) for x, y in points]
        assert sum(drawn, ()) == pytest.approx((0.5, 0, 1, 0.5, 0.5, 1, 0, 0.5))
        assert shape == "polygon(50% 0px, 100% 50%, 50% 100%, 0px 50%)"


def test_two_hundred_requests_do_not_stall_it(browser, port):
    with PlayedEngine(200), serving(port) as url, page_of(browser) as page:
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
    with PlayedEngine(2) as engine, serving(port) as url:
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
