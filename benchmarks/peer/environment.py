"""Makes the peer's virtual environment from a lock file."""

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peer.process import PeerError
from benchmarks.provenance import ROOT
from scripts.setup_env import CPU_TORCH_INDEX

LOCK = ROOT / "requirements" / "peer.txt"
FOLDER = ROOT / "runs" / "peer-venv"
PYTHON = FOLDER / "bin" / "python"


def set_up(folder: Path = FOLDER) -> None:
    """Create or update the environment.

    Raises:
        PeerError: pip could not install the lock.
    """
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pins = LOCK.read_text(encoding="utf-8").splitlines()
    torch = next(line for line in pins if line.startswith("torch=="))
    # Most package indexes have no CPU builds of torch.
    if pip(folder, torch) and pip(folder, torch, "--index-url", CPU_TORCH_INDEX):
        raise PeerError(f"setup: pip finds no {torch}; see its message above")
    if pip(folder, "-r", str(LOCK)):
        raise PeerError(f"setup: pip could not install {LOCK.name}, see above")


def pip(folder: Path, *words: str) -> int:
    """Install with `--no-deps` and return pip's exit status."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
    command += ["--disable-pip-version-check", "--quiet", *words]
    return subprocess.call(command, stdout=sys.stderr)
