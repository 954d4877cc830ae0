"""`make release`: each of its checks finds what it is for."""

import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.make import make
from vllm_kvpolicy import compat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402

VERSION = release.version_here()
INFO = f"vllm_kvpolicy-{VERSION}.dist-info"
METADATA = f"""Metadata-Version: 2.4
Name: vllm-kvpolicy
Version: {VERSION}
Requires-Python: >=3.11
License-File: LICENSE
Description-Content-Type: text/markdown

# A title
"""
ENTRY = "[console_scripts]\nvllm-kvpolicy = vllm_kvpolicy.__main__:main\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
MACHINE = "/ho" + "me/me/torch/library.h"


@pytest.fixture
def wheel(tmp_path: Path) -> release.Archive:
    """A wheel as it should be; its library is none."""
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "vllm_kvpolicy").rglob("*")
        if path.suffix in (".py", ".html")
    }
    files[release.CPU_LIBRARY] = b"\x7fELF torch/library.h"
    texts = {"METADATA": METADATA, "WHEEL": WHEEL, "entry_points.txt": ENTRY}
    texts |= {"RECORD": "", "licenses/LICENSE": "Apache"}
    files |= {f"{INFO}/{name}": text.encode() for name, text in texts.items()}
    return release.Archive(tmp_path / f"vllm_kvpolicy-{VERSION}-x.whl", files)


def with_file(name: str, old: str, new: str) -> Callable[[release.Archive], None]:
    """Return what changes a text in a file of an archive."""

    def change(archive: release.Archive) -> None:
        before = archive.files[name].decode()
        assert old in before
        archive.files[name] = before.replace(old, new, 1).encode()

    return change


def without(name: str) -> Callable[[release.Archive], None]:
    return lambda archive: archive.files.pop(name) and None


def beside(name: str, text: str = "") -> Callable[[release.Archive], None]:
    return lambda archive: archive.files.update({name: text.encode()})


def test_a_wheel_as_it_should_be_passes(wheel, capsys):
    for name in ("metadata", "content", "no path of a machine"):
        assert list(release.CHECKS[name](wheel)) == []


@pytest.mark.parametrize(
    ("check", "change", "told"),
    [
        (
            "metadata",
            with_file(f"{INFO}/METADATA", f"Version: {VERSION}", "Version: 9.9"),
            f"is vllm-kvpolicy 9.9, CHANGELOG.md has vllm-kvpolicy {VERSION}",
        ),
        ("metadata", without(f"{INFO}/METADATA"), "metadata: "),
        (
            "metadata",
            with_file(f"{INFO}/METADATA", "text/markdown", "text/plain"),
            "has no description in Markdown",
        ),
        (
            "metadata",
            with_file(f"{INFO}/METADATA", "License-File: LICENSE\n", ""),
            "does not name its license files",
        ),
        ("content", without(release.CPU_LIBRARY), f"{release.CPU_LIBRARY} is missing"),
        ("content", beside("tests/test_a.py"), "tests/test_a.py has no place in it"),
        ("content", beside("vllm_kvpolicy/x.py"), "vllm_kvpolicy/x.py has no place in"),
        (
            "content",
            with_file("vllm_kvpolicy/plugin.py", "import", "import "),
            "vllm_kvpolicy/plugin.py is not the checkout's: built before a change?",
        ),
        (
            "no path of a machine",
            beside(release.CPU_LIBRARY, f"\x00{MACHINE}\x00"),
            f"{release.CPU_LIBRARY} names {MACHINE}, a path of a machine",
        ),
        (
            "no path of a machine",
            beside("vllm_kvpolicy/a.py", f"X = '{sys.prefix}/lib'"),
            f"vllm_kvpolicy/a.py names {sys.prefix}, a path of a machine",
        ),
    ],
)
def test_what_is_wrong_with_a_wheel_is_found(check, change, told, wheel):
    change(wheel)
    found, *_ = release.CHECKS[check](wheel)
    assert found.startswith(told)


def test_a_wheel_without_kernels_may_be_meant(wheel, monkeypatch):
    monkeypatch.setenv("KVPOLICY_CPU", "0")
    del wheel.files[release.CPU_LIBRARY]
    assert list(release.wrong_content(wheel)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (beside("vllm_kvpolicy/observe/page.html"), ""),  # nothing
        (
            with_file("vllm_kvpolicy/plugin.py", '"""\n', '"""\nimport numpy\n'),
            "ModuleNotFoundError: No module named 'numpy'",
        ),
        (without("vllm_kvpolicy/__main__.py"), "No module named 'vllm_kvpolicy.__main"),
        (without(f"{INFO}/entry_points.txt"), "No such file or directory"),
    ],
)
def test_a_wheel_has_to_load_alone(change, told, wheel):
    change(wheel)
    path = wheel.path.with_name(f"vllm_kvpolicy-{VERSION}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as file:
        for name, text in wheel.files.items():
            file.writestr(name, text)
    assert release.Archive.of(path).files == wheel.files
    found = list(release.wrong_install(release.Archive.of(path)))
    assert [told in each for each in found] == ([True] if told else [])


@pytest.fixture
def sdist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> release.Archive:
    """The sdist of a copy of the sources, which becomes the checkout."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (*release.SOURCES, "CHANGELOG.md"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(
            ROOT / name, tmp_path / name
        )
    shutil.copytree(ROOT / "vllm_kvpolicy", tmp_path / "vllm_kvpolicy", ignore=ignored)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("A = 1\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.build_sdist(tmp_path / "dist")
    (path,) = (tmp_path / "dist").iterdir()
    return release.Archive.of(path)


def test_the_sdist_has_what_a_wheel_is_built_of(sdist, capsys):
    assert release.judge(sdist)
    checked = re.findall(r"^  ok +(.*)", capsys.readouterr().out, re.MULTILINE)
    assert checked == [name for name in release.CHECKS if name != "installs alone"]
    assert {"csrc/cpu/bindings.cpp", "LICENSE", "PKG-INFO"} <= sdist.files.keys()
    missing = {k: v for k, v in sdist.files.items() if not k.startswith("csrc/cpu")}
    missing["tests/test_a.py"] = b""
    assert list(release.wrong_content(replace(sdist, files=missing))) == [
        "csrc/cpu is missing",
        "tests/test_a.py has no place in it",
    ]
    (release.ROOT / "vllm_kvpolicy" / "table.json").write_text("{}")
    assert list(release.wrong_sdist(sdist)) == [
        "the wheel of it: vllm_kvpolicy/table.json is missing"
    ]


def test_each_supported_release_is_compared(monkeypatch, capsys):
    assert release.judge_surfaces()
    text = capsys.readouterr().out
    for minor in compat.RELEASES:
        line = rf"vLLM {minor}\.\d+, which has row.* 0 of them not known$"
        assert len(re.findall(line, text, re.MULTILINE)) == 1
    assert f"{compat.TESTED_VLLM}, installed" in text
    monkeypatch.setattr(compat, "RELEASES", {"0.99": None})
    assert not release.judge_surfaces()
    text = capsys.readouterr().out
    assert text.startswith("  FAILED  0.99, tools/vllm_surface/releases/0.99.json")
    assert "error:" in text


def test_a_failed_check_is_the_status(wheel, tmp_path, monkeypatch, capsys):
    (tmp_path / "dist").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(f"## {VERSION}\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "build_sdist", lambda folder: None)
    monkeypatch.setattr(release, "judge_surfaces", lambda: True)
    dist = tmp_path / "dist"
    with tarfile.open(dist / f"vllm_kvpolicy-{VERSION}.tar.gz", "w:gz"):
        pass
    with pytest.raises(SystemExit, match="gz in dist/, expected one wheel and one sd"):
        release.main()
    for path in (dist / "vllm_kvpolicy-0.31-x.whl", dist / wheel.path.name):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a", "b")
    with pytest.raises(SystemExit, match="0.31-x.whl, .*expected one wheel"):
        release.main()
    (dist / "vllm_kvpolicy-0.31-x.whl").unlink()
    for problems, status in (([], 0), (["it is blue"], 1)):
        check = {"colour": lambda archive, told=problems: iter(told)}
        monkeypatch.setattr(release, "CHECKS", check)
        assert release.main() == status
        printed = capsys.readouterr()
        assert ("FAILED  colour\n          it is blue\n" in printed.out) == bool(status)
        assert ("a check has FAILED" in printed.err) == bool(status)
        assert f"git tag --sign v{VERSION}" in printed.out
        assert "Nothing was signed or uploaded" in printed.out
    monkeypatch.setattr(release, "judge_surfaces", lambda: False)
    monkeypatch.setattr(release, "CHECKS", {})
    assert release.main() == 1


def test_make_builds_before_it_checks():
    told = make("--dry-run", "release", "PYTHON=true")
    assert told.returncode == 0, told.stderr
    wheel, checked = told.stdout.index("pip wheel"), told.stdout.index("release.py")
    assert wheel < checked


def test_it_neither_signs_nor_uploads():
    """What it runs is Python, pip, and git to ask."""
    source = (ROOT / "scripts" / "release.py").read_text()
    words = re.findall(r"git\(\"(\w+)\"", source)
    assert set(words) == {"status", "tag"} and "twine" not in source
