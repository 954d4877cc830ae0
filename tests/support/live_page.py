"""The live page of an engine that a test plays, in a real browser."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.live import KEY, serving_routes

WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}
SELECTED = "document.querySelector('[aria-selected=true]')?.dataset.id"
CELL = "document.getElementById('cell').innerText"
IS_SHOWN = "document.querySelectorAll('#strip i').length === 64"


@contextmanager
def serving(port: int) -> Iterator[str]:
    """Serve the routes; yields the page's URL."""
    with serving_routes(port, token_text=lambda token: f"{token} "):
        yield f"http://127.0.0.1:{port}/kv_policy/live"


@contextmanager
def page_of(browser: Any, width: str = "desk", scheme: str = "light") -> Iterator[Any]:
    """Yield a page; the test fails where its script does, or asks another host."""
    wide, tall = WIDTHS[width]
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": wide, "height": tall}
    )
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: wrong.extend([request.url] * (not is_own(request.url))),
    )
    try:
        yield page
    finally:
        context.close()
    assert wrong == []


def is_own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:"))


def unlock(page: Any, url: str) -> None:
    page.goto(f"{url}#key={KEY}")
