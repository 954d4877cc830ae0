"""Runs tests/interpreted in a process whose Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "interpreted").glob("test_*.py"))
SHARES = 2  # processes, each with every other file


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", range(SHARES))
def test_kernels_do_what_their_references_do(
    share: int, pytestconfig: pytest.Config
) -> None:
    command = [sys.executable, "-m", "pytest", "-q", *map(str, FILES[share::SHARES])]
    if pytestconfig.getoption("--every-name"):
        command.append("--every-name")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout.splitlines()[-1]
