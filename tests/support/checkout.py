"""The files of the checkout that runs the tests."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks, or would after `git add`, of these patterns."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    answer = subprocess.run(
        [*command, "--", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if answer.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in answer.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]
