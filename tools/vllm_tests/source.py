"""Fetches vLLM's tests and two packages that they import."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "vllm-tests"
"""Ignored by git: vLLM's tests are fetched, never committed."""
SOURCE = "vllm==0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
LONG = "tests/v1/core/test_priority_scheduler_random.py"
STEPS = "range(20000)", "range(400)"  # of each of LONG's twelve variants, and what runs
EXTRAS = "tblib==3.2.2", "pytest-asyncio==1.5.0"


def fetch(folder: Path = FOLDER) -> None:
    """Fetch the tests and the packages unless they are there.

    The packages get a folder of their own: our tests do without them.

    Raises:
        ValueError: pip does not bring them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tests").exists():
        _fetch_tests(folder)
    (folder / LONG).write_text((folder / LONG).read_text().replace(*STEPS))
    extras = folder / "extras"
    if not extras.exists():
        status, said = _pip("install", "--target", str(extras), *EXTRAS)
        if status:
            shutil.rmtree(extras, ignore_errors=True)
            raise ValueError(f"extras: expected pip to install {EXTRAS}, got:\n{said}")


def _fetch_tests(folder: Path) -> None:
    with TemporaryDirectory(dir=folder) as temporary:
        requirement = Path(temporary, "requirement.txt")
        requirement.write_text(f"{SOURCE} --hash=sha256:{SHA256}")
        # pip unpacks the source distribution and asks it for its metadata, which takes
        # packages that only a build has. With --no-clean the tree stays where it was.
        words = ["--no-binary", "vllm", "--no-build-isolation", "--no-clean"]
        words += ["--dest", temporary, "--requirement", str(requirement)]
        _, said = _pip("download", *words, temporary=temporary)
        found = list(Path(temporary).glob("pip-download-*/vllm_*/tests"))
        if not found:
            raise ValueError(f"tests: expected pip to unpack {SOURCE}, got:\n{said}")
        found[0].rename(folder / "tests")


def _pip(command: str, *words: str, temporary: str | None = None) -> tuple[int, str]:
    """Run pip; return its status and what it says."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", command]
    done = subprocess.run(
        [*pip, "--quiet", "--no-deps", *words],
        env=os.environ | ({"TMPDIR": temporary} if temporary else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout
