"""Fetches packages of the Python index by version and SHA-256."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOWNLOAD_SECONDS = 600
MISMATCH = "DO NOT MATCH THE HASHES"
"""What pip says of a file with another hash."""


class PinnedError(Exception):
    """Why a package could not be had, in one sentence."""


@dataclass(frozen=True)
class Package:
    """A file of the Python index.

    Attributes:
        requirement: `NAME==VERSION`.
        sha256: of the file, in hexadecimal digits.
        is_source: the source distribution, else a wheel.
    """

    requirement: str
    sha256: str
    is_source: bool = False


def download(package: Package, folder: Path) -> Path:
    """Fetch a package from the index that pip is set up with.

    pip compares the hash before it looks into the file. Of a source distribution it
    then prepares the metadata, with the setuptools of this environment.

    Args:
        folder: gets the file, and the list that pip reads.

    Returns:
        The file.

    Raises:
        PinnedError: pip could not fetch it, or it has another hash.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "1", "--require-hashes"]
    if package.is_source:
        command += ["--no-build-isolation", "--no-binary", ":all:"]
    else:
        command += ["--only-binary", ":all:"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    before = set(folder.iterdir())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise PinnedError(
            f"pip could not download {package.requirement} in {DOWNLOAD_SECONDS} s"
        ) from None
    if MISMATCH in done.stderr:
        raise PinnedError(
            f"{package.requirement}: the index has a file of another SHA-256, expected "
            f"{package.sha256}"
        )
    files = [path for path in folder.iterdir() if path not in before]
    if done.returncode or len(files) != 1:
        print(done.stderr, file=sys.stderr)
        raise PinnedError(f"pip could not download {package.requirement}; see above")
    return files[0]
