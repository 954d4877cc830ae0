"""Runs make as a shell does, whatever make runs the tests."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")


def make(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make without what a make above the tests tells those below it."""
    environment = {name: v for name, v in os.environ.items() if name not in OWN}
    return subprocess.run(
        ["make", *words], capture_output=True, text=True, cwd=cwd, env=environment
    )
