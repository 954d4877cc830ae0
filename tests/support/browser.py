"""Headless Chromium for tests, where it is installed."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser of Playwright's; skip the test where there is none.

    Playwright is in requirements/dev.txt. Chromium is not a package of pip's.
    """
    library = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install playwright"
    )
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium on PATH, on Debian: apt-get install chromium")
    with library.sync_playwright() as playwright:
        # Its sandbox cannot start where tests run as root, as in a container; what
        # stands in for a GPU hangs at times when a picture is taken.
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def wait_for(page: Any, script: str, seconds: float = 120) -> None:
    """Wait until an expression holds in a page.

    Playwright's own function would have the page compile text, which ours forbids.
    """
    deadline = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
        time.sleep(0.1)


@contextmanager
def thread_seconds(page: Any) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the time that a page's thread has computed.

    Until the end of the block, in seconds of CPU time.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def now() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in metrics if each["name"] == "ThreadTime")

    begun, found = now(), list[float]()
    yield lambda: found[0]
    found.append(now() - begun)
    session.detach()


# Of each element with text of its own: its contrast by WCAG's formula with the nearest
# background that is opaque.
CONTRAST = """() => {
    const light = (rgb) => rgb.map((c) => c / 255)
        .map((c) => (c > 0.04045 ? ((c + 0.055) / 1.055) ** 2.4 : c / 12.92))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
    const found = [];
    for (const node of document.body.querySelectorAll("*")) {
        const words = [...node.childNodes].filter((n) => n.nodeType === 3)
            .map((n) => n.data.trim()).join("");
        if (!words || !node.checkVisibility()) continue;
        let under = node, ground = [0, 0, 0, 0];
        while (under && ground[3] === 0) {
            const text = getComputedStyle(under).backgroundColor;
            ground = [...text.matchAll(/[0-9.]+/g)].map(Number);
            if (ground.length === 3) ground.push(1);
            under = under.parentElement;
        }
        const ink = [...getComputedStyle(node).color.matchAll(/[0-9.]+/g)].map(Number);
        const [a, b] = [light(ink.slice(0, 3)), light(ground.slice(0, 3))];
        found.push([words.slice(0, 40), Math.max(a, b) / Math.min(a, b)]);
    }
    return found;
}"""


def faint_texts(page: Any, least: float = 4.5) -> list[list[Any]]:
    """Return the visible texts of a page with less contrast, and how much they have."""
    found = page.evaluate(CONTRAST)
    assert found, "the page shows no text"
    return [each for each in found if each[1] < least]
