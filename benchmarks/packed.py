"""Reads and writes text files, packed where their name ends in `.xz`."""

import lzma
from pathlib import Path

SUFFIX = ".xz"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is packed in another way, or damaged.
    """
    content = path.read_bytes()
    if path.suffix == SUFFIX:
        try:
            content = lzma.decompress(content)
        except lzma.LZMAError as error:
            raise ValueError(f"{path}: expected a file packed by xz: {error}") from None
    return content.decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a text; the same text always makes the same file."""
    content = text.encode("utf-8")
    if path.suffix == SUFFIX:
        content = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    path.write_bytes(content)


def name_of(path: Path) -> str:
    """Return the name of a file without its suffixes.

    >>> name_of(Path("results/ams.json.xz"))
    'ams'
    """
    return path.name.partition(".")[0]
