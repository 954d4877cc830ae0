"""Every module, class and command that a string names exists; nothing is imported."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support.checkout import ROOT, tracked

FIRST_PARTY = ("vllm_kvpolicy", "benchmarks", "reasoner", "tools", "training")
# "vllm_kvpolicy.a.b", "vllm_kvpolicy.a.b.Class" and "vllm_kvpolicy.a.b:Class".
NAME = re.compile(r"(?<![\w./])vllm_kvpolicy(?:\.[a-zA-Z_]\w*)+(?::\w+)?")
COMMAND = re.compile(rf"-m ((?:{'|'.join(FIRST_PARTY)})(?:\.\w+)*)")
FOLDERS = "|".join((*FIRST_PARTY, "tests", "docs", "scripts", "csrc", "docker"))
# Names with capitals stand for others: csrc/STEM.cu.
FILE = re.compile(rf"(?<![\w./{{-])((?:{FOLDERS})/[a-z_\d./-]*[a-z_\d])(?![\w*])")
PAGES = ("*.md", "Makefile", "docker/*", "tools/gpu/*.sh", "*.toml", ".ci/*")
ROOM_FILE = re.compile(r"`([a-z_\d]+(?:/[a-z_\d]+)+\.py)`")
ROOMS = [path.name for path in (ROOT / "vllm_kvpolicy").iterdir() if path.is_dir()]
ROOM_NAME = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.(?!py\b)\w+)+)`")
READ = ("docs/*.md", "benchmarks/reports/*.md", "README.md", "CONTRIBUTING.md")
SOURCES = ("vllm_kvpolicy/*.py", "training/*.py", "benchmarks/*.py", "scripts/*.py")
SOURCES += ("setup.py",)
# Made by the build, by the reader of docs/add_a_policy.md, by a run on a GPU.
MADE = re.compile(
    r"vllm_kvpolicy\._C(?:_cpu)?$|.*[./](?:(?:test_)?vnorm|shortkeys)\b|benchmarks/results/gpu/"
)


def strings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each string of a Python file, or each line of a page."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@cache
def source_of(module: str) -> str | None:
    """Return the text of a module or of a package's `__init__`, if it exists."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text()
    return "" if path.is_dir() else None


def defines(text: str, name: str) -> bool:
    """Return whether a module binds a name, or has it as text in its `__getattr__`."""
    bound = rf"^\s*(?:(?:async )?def|class) {name}\b|^\s*{name}(?:: .+)? ="
    bound += rf"|^\s*{name}: |^(?:from|import) .*\b{name}\b|^    {name},$"
    lazily = rf"def __getattr__(?:.|\n)*\"{name}\""
    return re.search(f"{bound}|{lazily}", text, re.MULTILINE) is not None


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or what one defines."""
    parts = re.split("[.:]", name)
    sizes = range(len(parts), 0, -1)
    size = next((n for n in sizes if source_of(".".join(parts[:n])) is not None), 0)
    text = source_of(".".join(parts[:size])) if size else None
    return text is not None and all(defines(text, part) for part in parts[size:])


def resolves_within(name: str) -> bool:
    """Return whether a name resolves within the package."""
    return resolves(f"vllm_kvpolicy.{name}")


def runs(module: str) -> bool:
    """Return whether `python -m` runs a module: a program, or `__main__`."""
    if source_of(f"{module}.__main__") is not None:
        return True
    return "\nif __name__ ==" in (source_of(module) or "")


def exists(path: str) -> bool:
    """Return whether a path within the checkout is a file or a folder."""
    return (ROOT / path).exists()


def in_a_room(path: str) -> bool:
    """Return whether a path is a file of the checkout or of the package."""
    return exists(path) or exists(f"vllm_kvpolicy/{path}")


def found_in(
    pattern: re.Pattern[str], patterns: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield (place, what) for each match in the strings and pages of the checkout."""
    for path in tracked(*patterns):
        for line, text in strings_of(path):
            for match in pattern.finditer(text):
                what = match[match.lastindex or 0]
                yield f"{path.relative_to(ROOT)}:{line}", what


def missing(
    pattern: re.Pattern[str], patterns: tuple[str, ...], is_good: Callable[[str], bool]
) -> list[str]:
    """Return "place: what" for each match that names nothing."""
    named = list(found_in(pattern, patterns))
    assert len(named) > 20
    return [
        f"{place}: {what}"
        for place, what in named
        if not MADE.match(what) and not is_good(what)
    ]


@pytest.mark.parametrize(
    ("pattern", "pages", "is_good"),
    [
        (NAME, SOURCES + PAGES, resolves),
        (COMMAND, SOURCES + PAGES, runs),
        (FILE, SOURCES + PAGES, exists),
        # Pages name a file of the package by its room: `kernels/ranking.py`.
        (ROOM_FILE, READ, in_a_room),
        # Docstrings and pages leave the package's name out: `policies.base`.
        (ROOM_NAME, SOURCES + READ, resolves_within),
    ],
    ids=["names", "commands", "files", "files of rooms", "names of rooms"],
)
def test_what_is_named_exists(pattern, pages, is_good) -> None:
    found = missing(pattern, pages, is_good)
    assert not found, "\n".join(found)


def test_what_is_named_is_found() -> None:
    text = "see `vllm_kvpolicy.a.b:C`, /x/vllm_kvpolicy.d and vllm_kvpolicy.e.f."
    assert NAME.findall(text) == ["vllm_kvpolicy.a.b:C", "vllm_kvpolicy.e.f"]
    assert COMMAND.findall("$(PY) -m benchmarks.gpu x; -m pytest") == ["benchmarks.gpu"]
    assert FILE.findall("in tests/a/b.py, ./docs/c.md, csrc/STEM.cu.") == [
        "tests/a/b.py"
    ]
    assert ROOM_FILE.findall("`kernels/a.py` and `b.py`") == ["kernels/a.py"]
    assert not in_a_room("kernels/a.py") and in_a_room("kernels/ranking.py")
