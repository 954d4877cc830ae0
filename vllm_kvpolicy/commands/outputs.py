"""Tables that commands print, and paths that they write to.

Measurements and trainings take minutes to days: one that cannot write what it finds
must not begin. `new_file` and `new_folder` check paths while the command line is read,
as argparse's `type`, so that an error names the option.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def table(lines: Iterable[Sequence[str]], are_numbers: bool = False) -> str:
    """Return lines as columns.

    Args:
        are_numbers: align the columns behind the first one at the right.
    """
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if are_numbers else str.ljust
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(align, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what vLLM tells of its starts out of the way, but for errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def new_file(text: str) -> Path:
    """Return the path of a file that can be written; makes its folder, not the file.

    Raises:
        argparse.ArgumentTypeError: it is a folder, or it or its folder cannot be
            written to.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(
                f"got {text!r}, which is a folder, expected a file"
            )
        if path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        else:
            _check_folder(_existing(path.parent), text)
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(text, error) from None
    return path


def new_folder(text: str) -> Path:
    """Return the path of a folder that can be written to, or made; makes none.

    Raises:
        argparse.ArgumentTypeError: it or a folder that it would be in is a file, or
            cannot be written to.
    """
    path = Path(text)
    try:
        _check_folder(_existing(path), text)
    except OSError as error:
        raise _unwritable(text, error) from None
    return path


def _existing(path: Path) -> Path:
    """Return the path, or what there is of the folders that it would be in."""
    there = path if path.exists() else path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there


def _check_folder(folder: Path, text: str) -> None:
    """Try to write to a folder, which knows of full disks and what is read-only."""
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, but {str(folder)!r} is not a folder"
        )
    with tempfile.TemporaryFile(dir=folder):
        pass


def _unwritable(text: str, error: OSError) -> argparse.ArgumentTypeError:
    reason = f"got {text!r}, cannot write there: {error.strerror}"
    return argparse.ArgumentTypeError(reason)
