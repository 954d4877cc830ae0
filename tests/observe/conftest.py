"""What tests of observers share: a folder and a port per test, a browser per file."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import chromium
from support.servers.servers import free_port


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests are skipped without it."""
    with chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes share files in this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port()
