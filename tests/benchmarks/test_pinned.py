"""Tests of pinned packages: pip fetches them, and another hash is refused.

The index is a folder, so no network is needed.
"""

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks.pinned import Package, PinnedError, download

METADATA = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Return the wheel small 1.0 in a folder that pip takes for its index."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("small-1.0.dist-info/METADATA", METADATA)
        archive.writestr("small-1.0.dist-info/WHEEL", TAGS)
        archive.writestr("small-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def test_a_pinned_file_is_fetched(index, tmp_path):
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    target = tmp_path / "target"
    target.mkdir()
    found = download(Package("small==1.0", digest), target)
    assert found == target / index.name
    assert found.read_bytes() == index.read_bytes()


def test_another_hash_is_refused(index, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(PinnedError, match="another SHA-256, expected 0000"):
        download(Package("small==1.0", "0" * 64), target)
    assert not (target / index.name).exists()


def test_a_package_that_is_not_there(index, tmp_path):
    with pytest.raises(PinnedError, match="could not download other==1.0"):
        download(Package("other==1.0", "0" * 64), tmp_path)
