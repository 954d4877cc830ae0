"""Headless Chromium for tests, where it is installed."""

import shutil
import time
from collections.abc import Iterator
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
        # Its sandbox cannot start where tests run as root, as in a container.
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            browser.close()


def wait_for(page: Any, script: str, seconds: float = 30) -> None:
    """Wait until an expression holds in a page.

    Playwright's own function would have the page compile text, which ours forbids.
    """
    deadline = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
        time.sleep(0.1)
