"""Runs modules of tests/support as programs, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run_program(
    module: str, *words: object, seconds: float | None = None, **environment: str
) -> str:
    """Run a module within tests/; return what it printed.

    Args:
        module: dotted name.
        words: of its command line.
        seconds: that it may take, None for as long as the test.
        **environment: variables that differ from this process'.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
