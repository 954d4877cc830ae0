"""The rehearsal of a GPU run, and what of a checkout travels to it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "gpu"


def bash(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script of tools/gpu; both outputs are one text."""
    return subprocess.run(
        ["bash", str(TOOLS / script), *words],
        env={**os.environ, "LEVEL": "0", "PYTHON": sys.executable, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_kernels_of_other_sources_do_not_travel(tmp_path: Path) -> None:
    words, carry = (str(tmp_path / "checkout.tar.xz"),), tmp_path / "carry"
    sources = carry / "kernels" / "sources"
    sources.parent.mkdir(parents=True)
    sources.write_text("of other sources\n")
    done = bash("pack_checkout.sh", *words, CARRY=str(carry))
    assert done.returncode == 1 and "run tools/gpu/build_kernels.sh" in done.stdout


def test_what_travels_imports_nothing_that_stays() -> None:
    patterns = "--exclude-from=tools/gpu/travels.txt"
    command = ["git", "ls-files", "--cached", "--ignored", patterns, "--", "*.py"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).split()
    paths = [path for path in listed if (ROOT / path).exists()]
    known = {name for path in paths for name in names_of(path)}
    tops = {name for name in known if "." not in name} - {"setup", "conftest"}
    wanted = [(path, name) for path in paths for name in imported(ROOT / path)]
    left = [pair for pair in wanted if pair[1].split(".")[0] in tops]
    assert len(left) > 500
    assert not [pair for pair in left if pair[1] not in known]


def names_of(path: str) -> set[str]:
    """Return the names of a module and of its packages; tests/ is a root as well."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    names = {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
    return names | {name.removeprefix("tests.") for name in names}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, at the top and within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.slow
def test_everything_starts_where_only_what_travels_is(tmp_path: Path) -> None:
    """A broken part shows in the status, the others run all the same."""
    words = ("check", "serving", "no such part", "kernels")
    done = bash("rehearse.sh", *words, CARRY=str(tmp_path / "none"))
    assert done.returncode == 1 and "invalid choice" in done.stdout
    for word in ("check", "serving", "kernels"):
        assert f"== {word}: status 0" in done.stdout, done.stdout[-5000:]
    assert "flash: would run" in done.stdout and "Part serving" in done.stdout
