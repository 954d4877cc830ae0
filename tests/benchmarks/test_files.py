"""Tests of files: packed records, their provenance, and packages that are pinned.

The index of the last is a folder, so no network is needed.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import packed, provenance
from benchmarks.pinned import Package, PinnedError, download

METADATA = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.mark.parametrize("name", ["one.json", "one.json.xz"])
def test_a_text_comes_back(tmp_path, name):
    path = tmp_path / name
    packed.write_text(path, "Zwölf\n" * 100)
    assert packed.read_text(path) == "Zwölf\n" * 100
    assert (path.stat().st_size < 200) == name.endswith("xz")
    assert packed.name_of(path) == "one"


def test_a_damaged_file_is_named(tmp_path):
    path: Path = tmp_path / "one.json.xz"
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="one.json.xz: expected a file packed by xz"):
        packed.read_text(path)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/a/my machine/model", "model"),
        ("--model=/a/my machine/model", "--model=model"),
        ("--serve-args=--chat /a/b.jinja -x", "--serve-args=--chat b.jinja -x"),
        ("--chat-template /a/b.jinja --seed 1", "--chat-template b.jinja --seed 1"),
        ('{"trace": "/a/b", "x": ["/a/c"]}', '{"trace": "b", "x": ["c"]}'),
        ("runs/accuracy.jsonl", "runs/accuracy.jsonl"),
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("1/4", "1/4"),
    ],
)
def test_no_folder_of_this_machine_is_in_a_command(monkeypatch, word, expected):
    assert provenance.redacted(word) == expected
    monkeypatch.setattr(sys, "argv", ["/x/y", word])
    assert "/a/" not in provenance.collect("benchmarks.report")["command"]


def test_provenance_names_command_versions_and_machine(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "pressure", "--out", "a b.json"])
    found = json.loads(json.dumps(provenance.collect("benchmarks.serving")))
    assert found["command"] == "python -m benchmarks.serving pressure --out 'a b.json'"
    assert found["vllm"].startswith("0.32")
    for key in ("python", "torch", "vllm-kvpolicy", "cpu", "started"):
        assert found[key]
    assert found["cores"] >= 1


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


def test_a_pinned_file_is_fetched_and_another_is_refused(index, tmp_path):
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    target = tmp_path / "target"
    target.mkdir()
    found = download(Package("small==1.0", digest), target)
    assert found == target / index.name
    assert found.read_bytes() == index.read_bytes()
    found.unlink()
    with pytest.raises(PinnedError, match="another SHA-256, expected 0000"):
        download(Package("small==1.0", "0" * 64), target)
    assert not (target / index.name).exists()
