"""Runs tests/interpreted in a process whose Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(1200)
def test_kernels_do_what_their_references_do() -> None:
    command = [sys.executable, "-m", "pytest", "-q", str(TESTS / "interpreted")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout.splitlines()[-1]
