"""Waits for what another thread or process does."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(check: Callable[[], Found], seconds: float = 120) -> Found:
    """Wait until a check finds something, and return what.

    Args:
        check: called again and again; what it returns is true once it has found it.
        seconds: after which the test fails.
    """
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found
