"""The page in a real browser, with an engine that a test plays."""

import pytest

from support.browser import faint_texts, thread_seconds, wait_for
from support.live import FACTS, KEY, PlayedEngine
from support.live_page import CELL, IS_SHOWN, SELECTED, WIDTHS, page_of, serving, unlock
from support.sweeps import paired
from support.waiting import wait_until


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


@pytest.mark.parametrize(("width", "scheme"), paired(WIDTHS, ["light", "dark"]))
def test_a_request_is_followed(browser, port, width, scheme):
    with PlayedEngine(3), serving(port) as url, page_of(browser, width, scheme) as page:
        unlock(page, url)
        wait_for(page, IS_SHOWN)
        assert KEY not in page.url
        assert page.inner_text("#title") == "ams-tova"
        assert page.inner_text("#n-running") == "3"
        assert page.inner_text("#o-running") == "stock could run 1"
        assert page.inner_text("#n-pool") == "23 %"
        assert rows(page) == 3
        policy = page.locator("#rows td:nth-child(2)").first
        assert policy.inner_text().split("\n") == ["ams-tova", "64 / 32"]
        assert page.locator(".level:visible, .floor:visible").count() == 0
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_key_opens_it_and_all_text_has_the_contrast_of_wcag_aa(browser, port, scheme):
    """With tokens of every share of heads, and the field, which a wrong key leaves."""
    with (
        PlayedEngine(3),
        serving(port) as url,
        page_of(browser, "desk", scheme) as page,
    ):
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        assert faint_texts(page) == []
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        wait_for(page, "document.getElementById('refused').textContent !== ''")
        assert rows(page) == 0
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


def test_it_works_by_keyboard(browser, port):
    """The tab key reaches all controls and shows where it is."""
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
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        wait_for(page, f"{CELL}.includes('Layer 1, head 0')")
        page.keyboard.press("Escape")
        wait_for(page, f"!{CELL}.includes('Layer')")
        page.focus("[aria-selected=true]")
        first = page.evaluate(SELECTED)
        assert page.evaluate("document.activeElement.dataset.id") == first
        page.keyboard.press("ArrowDown")
        assert page.evaluate(SELECTED) != first
        page.keyboard.press("Escape")  # back to the page's own choice
        wait_for(page, f"{SELECTED} === '{first}'")
        wait_for(page, "!document.getElementById('detail').hidden")


def test_it_survives_a_restart(browser, port):
    with PlayedEngine(2), page_of(browser) as page:
        with serving(port) as url:
            unlock(page, url)
            page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#status[data-state=off]")
        with serving(port):
            page.wait_for_selector("#status[data-state=live]")
            page.evaluate("(view.engines = [], view.requests.clear())")
            wait_for(page, "view.requests.size === 2")
            assert page.get_attribute("#status", "data-state") == "live"


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


def test_events_are_drawn_as_the_legend_says(browser, port):
    """Those of the chosen request over the others; preemptions as diamonds."""
    with PlayedEngine(2), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 2")
        drawn = page.evaluate(CHOSEN_LAST)
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
        assert drawn[3] == page.evaluate("ink('--s4')")
        colour, *points = page.evaluate(DIAMOND)
        assert colour == page.evaluate("ink('--alert')")
        left, top = (min(point[axis] for point in points) for axis in (0, 1))
        width, height, shape = page.evaluate(LEGEND)
        drawn = [((x - left) / width, (y - top) / height) for x, y in points]
        assert sum(drawn, ()) == pytest.approx((0.5, 0, 1, 0.5, 0.5, 1, 0, 0.5))
        assert shape == "polygon(50% 0px, 100% 50%, 50% 100%, 0px 50%)"


UNDER_PRESSURE = """() => {
    showPools(); showRequests();
    const left = (mark) => mark.hidden ? null : parseFloat(mark.style.left);
    const rows = [...document.querySelectorAll("#rows tr")].map((row) => {
        const [, floor, level, pin] = row.querySelector(".keep").children;
        const {innerText, title} = row.children[3];
        return [row.classList.contains("uncut"), innerText, title, left(floor),
                left(level), parseFloat(pin.style.width)];
    });
    const pool = left(document.querySelector(".pool .level"));
    return [view.engines[0].requests, rows, pool, $("legend").lastChild.innerText];
}"""
NO_LEVEL = """document.querySelector(".pool .level").hidden &&
    $("legend").lastChild.hidden &&
    !document.querySelector("#rows .level:not([hidden])")
"""


def test_under_pressure_it_shows_the_level_floors_and_who_was_never_cut(
    browser, port, monkeypatch
):
    """The level is below the floor of these requests, which they keep."""
    level, floor, pinned = 20, 60, 32
    monkeypatch.setitem(FACTS, "events", "pressure")
    with (
        PlayedEngine(3, num_without=1) as engine,
        serving(port) as url,
        page_of(browser) as page,
    ):
        engine.floor, engine.pinned = floor, pinned
        engine.counters.set("level_tokens", level)
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr.uncut').length === 1")
        said = "cut when the pool runs short, not below 64 tokens per KV head"
        assert page.inner_text("#subtitle") == f"tiny · {said}"
        assert page.inner_text("#own-head") == "floor / interval"
        assert page.locator("#rows .own").first.inner_text() == f"{floor} / 32"
        requests, rows, pool, legend = page.evaluate(UNDER_PRESSURE)
        left = 7 - sum(each["held"] - floor for each in requests) // 32
        assert pool == pytest.approx(100 * left / 30, abs=0.01)
        words = f"if all were cut to the level, {level} tokens per KV head"
        assert legend.split() == [str(left), *words.split()]
        for place, (request, row) in enumerate(zip(requests, rows, strict=True)):
            is_uncut, kept, title, *marks = row
            assert is_uncut == (not place) == (kept == "all")
            pinned = request["pinned"]
            said = f"pinned {pinned}, " * (pinned > 0)
            said += f"floor 60, level {level + pinned}"
            assert title == "never cut, " * is_uncut + said
            tokens = floor, level + pinned, pinned
            at = [100 * each / request["computed"] for each in tokens]
            assert marks == pytest.approx(at, abs=0.01)
        assert faint_texts(page) == []
        engine.num_without = 3
        wait_for(page, NO_LEVEL)


REDRAW = """() => {
    for (let i = 1; i <= 10; i++) {
        const engines = structuredClone(view.engines);
        for (const request of engines[0].requests) request.computed += i;
        take("state", {at: Date.now() / 1000, engines});
        showPools(); showRequests(); follow(); showEvents();
        document.body.offsetHeight;  // which has the browser lay it out
    }
}"""


def test_two_hundred_requests_do_not_stall_it(browser, port):
    """By the time that its thread computes, however many others do as well."""
    with PlayedEngine(200), serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 200")
        with thread_seconds(page) as seconds:
            page.evaluate(REDRAW)
        assert 0 < seconds() / 10 < 0.25  # it is about 0.025


def test_nobody_is_told_once_the_page_is_closed(browser, port, monkeypatch):
    monkeypatch.setattr("vllm_kvpolicy.observe.shared_files.LISTEN_SECONDS", 0.5)
    with PlayedEngine(2) as engine, serving(port) as url:
        with page_of(browser) as page:
            unlock(page, url)
            wait_for(page, "document.querySelectorAll('#rows tr').length === 2")
        wait_until(lambda: not engine.scheduler.is_heard())
        wait_for_steps(engine, 2)  # it may have looked before
        told = engine.num_told
        wait_for_steps(engine, 5)
        assert engine.num_told == told > 0


def wait_for_steps(engine, number):
    last = engine.num_steps + number
    wait_until(lambda: engine.num_steps >= last)
