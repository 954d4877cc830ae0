"""What tests of the page share: one browser per file, and a port per test."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import chromium
from support.servers.servers import free_port


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests are skipped without it."""
    with chromium() as found:
        yield found


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    return free_port()
