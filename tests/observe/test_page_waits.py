"""The page while answers are late or lost, and while it goes from one state to another.

Nothing here depends on how fast the page, the server or the engine is.
"""

import pytest

from support.browser import wait_for
from support.live import KEY, PlayedEngine
from support.live_page import CELL, IS_SHOWN, SELECTED, page_of, serving, unlock
from support.waiting import wait_until

ANSWERS = "**/requests/*"  # about one request
# What frames that are due draw, and what follows from it, such as a change of focus.
NEXT_FRAME = "new Promise((go) => requestAnimationFrame(() => setTimeout(go)))"


def hold(page):
    """Hold back answers from now on; returns what lets them go."""
    held, is_over = [], []
    page.evaluate("view.patience = 1e6")
    page.route(
        ANSWERS, lambda route: route.continue_() if is_over else held.append(route)
    )

    def let_go():
        is_over.append(True)
        for route in held:
            route.continue_()

    return let_go


def test_no_key_is_lost_while_an_answer_is_awaited(browser, port):
    """As the page goes from one request to another."""
    with PlayedEngine(3) as engine, serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, IS_SHOWN)
        let_go = hold(page)
        page.evaluate(f"choose('{engine.names[1]}', true)")
        page.keyboard.press("Escape")  # back to the page's own choice
        wait_for(page, f"{SELECTED} === '{engine.names[0]}'")
        page.focus("#heat")
        for layer in range(3):
            page.keyboard.press("ArrowRight")
            page.evaluate(NEXT_FRAME)
            assert f"Layer {layer}, head 0" in page.inner_text("#cell")
        before = page.inner_text("#cell")
        let_go()
        wait_for(page, f"{CELL} !== {before!r}")
        assert "Layer 2, head 0" in page.inner_text("#cell")
        assert page.evaluate("document.activeElement.id") == "heat"


def test_what_heads_keep_bears_the_name_of_its_request(browser, port):
    """Also while the answer about another one, which has had no event, is awaited."""
    with PlayedEngine(3) as engine, serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, IS_SHOWN)
        first, second = (page.evaluate(f"shortId('{n}')") for n in engine.names[:2])
        let_go = hold(page)
        page.evaluate(f"(choose('{engine.names[1]}', true), showDetail())")
        assert page.inner_text("#who").startswith(first) and page.is_visible("#heat")
        let_go()
        wait_for(page, "document.getElementById('detail').hidden")
        assert page.inner_text("#who") == second


def test_a_request_without_events_does_not_keep_it_from_one_with(browser, port):
    """Such as one without a policy that comes first; unless it is chosen by hand."""
    with (
        PlayedEngine(3, num_without=3) as engine,
        serving(port) as url,
        page_of(browser) as page,
    ):
        unlock(page, url)
        wait_for(page, f"{SELECTED} === '{engine.names[0]}'")
        engine.num_without = 1
        wait_for(page, f"{SELECTED} === '{engine.names[1]}'")
        wait_for(page, IS_SHOWN)
        page.click("#rows tr")
        wait_for(page, "document.getElementById('detail').hidden")
        events = page.inner_text("#rate")
        wait_for(page, f"document.getElementById('rate').innerText !== '{events}'")
        assert page.evaluate(SELECTED) == engine.names[0]


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "silent"])
def test_an_answer_that_is_lost_is_asked_for_again(browser, port, is_silent):
    """The request's only event does not come again."""
    asked = []

    def lose(route):
        asked.append(route)
        if len(asked) > 3:
            route.continue_()
        elif not is_silent:
            route.abort()

    with PlayedEngine(1, most_events=1), serving(port) as url, page_of(browser) as page:
        page.route(ANSWERS, lose)
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        page.evaluate("(view.patience = 800, view.rest = 10)")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, IS_SHOWN)
        assert len(asked) > 3


def test_an_error_is_not_asked_for_again_at_once(browser, port):
    """However often the page draws meanwhile."""
    asked = []

    def fail(route):
        asked.append(route)
        route.fulfill(status=500)

    with PlayedEngine(3) as engine, serving(port) as url, page_of(browser) as page:
        page.route(ANSWERS, fail)
        page.goto(url)
        page.wait_for_selector("#door:not([hidden])")
        assert page.evaluate("view.rest") == 2000
        page.evaluate("view.rest = 1e6")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, f"{SELECTED} === '{engine.names[0]}'")
        wait_until(lambda: page.evaluate(NEXT_FRAME) or asked)
        for _ in range(20):
            page.evaluate("(ask(), draw())")
            page.evaluate(NEXT_FRAME)
        assert len(asked) == 1


def test_an_answer_that_wants_a_key_locks_the_page(browser, port):
    """As of a server that took a key back; one stream is left after the next key."""
    asked, begun, ended = [], [], []

    def refuse(route):
        asked.append(route)
        if len(asked) > 1:
            route.continue_()
        else:
            route.fulfill(status=401)

    with PlayedEngine(3), serving(port) as url, page_of(browser) as page:
        page.route(ANSWERS, refuse)
        for name, found in (("request", begun), ("requestfailed", ended)):
            page.on(
                name,
                lambda request, found=found: (
                    found.append(request) if request.url.endswith("/stream") else None
                ),
            )
        unlock(page, url)
        page.wait_for_selector("#door:not([hidden])")
        assert page.inner_text("#refused") == "not one of its keys"
        for _ in range(20):
            page.evaluate("(draw(), ask())")
            page.evaluate(NEXT_FRAME)
        assert page.inner_text("#refused") == "not one of its keys"
        assert page.inner_text("#status") == "locked"
        assert len(asked) == 1
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        wait_for(page, IS_SHOWN)
        assert page.is_hidden("#door")
        assert (len(begun), len(ended)) == (2, 1)


def test_a_pause_stops_what_is_due(browser, port):
    with PlayedEngine(3) as engine, serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "document.querySelectorAll('#rows tr').length === 3")
        before = page.evaluate(
            """() => {
                for (const request of view.requests.values()) request.computed += 1;
                draw();
                pause();
                return $("rows").innerText;
            }"""
        )
        wait_for(page, "document.getElementById('status').innerText === 'paused'")
        last = engine.num_steps + 10
        wait_until(lambda: engine.num_steps >= last)
        page.evaluate(NEXT_FRAME)
        assert page.inner_text("#rows") == before
        page.keyboard.press("p")
        wait_for(page, f"document.getElementById('rows').innerText !== {before!r}")


def test_events_are_counted_once_however_often_they_are_told(browser, port):
    """A new stream begins with the newest ones."""
    with PlayedEngine(3) as engine, serving(port) as url, page_of(browser) as page:
        unlock(page, url)
        wait_for(page, "view.lines.length > 5")
        page.evaluate(NOTE_TOLD)
        for _ in range(2):
            page.keyboard.press("p")
            last = engine.num_steps + 5
            wait_until(lambda last=last: engine.num_steps >= last)
        wait_for(page, "told.size > 5 && again > 5")
        assert page.evaluate("new Set(view.lines.map(nameOf)).size === told.size")
        assert page.evaluate("view.lines.length === told.size")


NOTE_TOLD = """() => {
    const own = take;
    window.nameOf = (line) => `${line.request} ${line.serial}`;  // as the engine counts
    window.told = new Set(view.lines.map(nameOf));
    window.again = 0;
    take = (name, content) => {
        own(name, content);
        if (name === "server" || name === "state" || view.paused) return;
        const line = nameOf({ kind: name, ...content });
        if (told.has(line)) again += 1;
        told.add(line);
    };
}"""
