"""Packed records."""

from pathlib import Path

import pytest

from benchmarks import packed


@pytest.mark.parametrize("name", ["one.json", "one.json.xz"])
def test_a_text_comes_back(tmp_path, name):
    path = tmp_path / name
    packed.write_text(path, "Zwölf\n" * 100)
    assert packed.read_text(path) == "Zwölf\n" * 100
    assert (path.stat().st_size < 200) == name.endswith("xz")
    assert packed.name_of(path) == "one"


def test_the_same_text_makes_the_same_file(tmp_path):
    one, two = tmp_path / "one.xz", tmp_path / "two.xz"
    for path in (one, two):
        packed.write_text(path, "a")
    assert one.read_bytes() == two.read_bytes()


def test_a_damaged_file_is_named(tmp_path):
    path: Path = tmp_path / "one.json.xz"
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="one.json.xz: expected a file packed by xz"):
        packed.read_text(path)
