"""Tells which sources a library was built of; setup.py reads this file, too."""

from hashlib import sha256
from pathlib import Path


def digest_of(folder: Path) -> str:
    """Return what tells the sources of a library from changed ones.

    Args:
        folder: of the sources; a folder `cpu` in it is that of another library.
    """
    found = sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != "cpu":
            found.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return f"sources {found.hexdigest()}"
