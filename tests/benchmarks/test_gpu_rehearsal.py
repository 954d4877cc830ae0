"""The rehearsal of a GPU run, and what of a checkout travels to it."""

import ast
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.check import imports
from benchmarks.gpu.engine import EngineSpec
from benchmarks.gpu.record import Record
from benchmarks.gpu.rehearsal import RehearsedProcess
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "gpu"
ENGINE_PARTS = ("min", "min-32", "a", "b-fp8", "c", "d")


def bash(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a script of tools/gpu; both outputs are one text."""
    return subprocess.run(
        ["bash", str(TOOLS / script), *words],
        env={**os.environ, "LEVEL": "0", "PYTHON": sys.executable, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("part", ENGINE_PARTS)
def test_parts_with_engines_keep_their_plan(part: str, tmp_path: Path, capsys) -> None:
    """Real sizes on a card of 80 GiB; every cell is there, and every table prints."""
    assert command.main([part, "--rehearse", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert list(record["cells"]) and record["settings"]["rehearsal"] is True
    assert set(record["cells"]) == set(record["settings"]["names"])
    printed = capsys.readouterr().out
    assert "REHEARSAL" in printed and f"Part {part}:" in printed
    if part == "c":
        assert "| 0.500 " in printed and "bandwidth floor / attention" in printed


def test_a_rehearsal_is_never_taken_for_a_measurement(tmp_path: Path) -> None:
    assert command.main(["min-32", "--rehearse", "--out", str(tmp_path)]) == 0
    path = tmp_path / "gpu-min-32.json"
    settings = json.loads(path.read_text())["settings"]
    del settings["rehearsal"]
    with pytest.raises(ValueError, match="gpu-min-32.json: holds settings"):
        Record(path, "min-32", settings)


def rehearsed(tmp_path: Path, **fields: Any) -> RehearsedProcess:
    spec = EngineSpec(
        "stock", "llama-3.1-8b", tmp_path, 4096, 512, 8, is_rehearsal=True, **fields
    )
    return RehearsedProcess(spec)


def test_plans_that_vllm_would_refuse_fail_in_a_rehearsal(tmp_path: Path) -> None:
    engine = rehearsed(tmp_path)
    fits = Workload(tuple(range(10, 90)), (100,) * 8, 400, 0)
    assert engine.call("round", workload=fits, number=0)["complete"]
    long = Workload(tuple(range(10, 90)), (200,) * 8, 400, 0)
    with pytest.raises(ValueError, match="got 200 . 400 tokens, expected at most 512"):
        engine.call("round", workload=long, number=0)
    engine = rehearsed(tmp_path)
    with pytest.raises(ValueError, match="pool: expected 1 to 255 blocks"):
        engine.call("round", workload=fits, number=0, pool_bytes=2**40)


def test_bytes_are_counted_and_limited(tmp_path: Path) -> None:
    (tmp_path / "carry").mkdir()
    (tmp_path / "carry" / "file").write_bytes(bytes(3 * 2**20))
    packed = tmp_path / "checkout.tar.xz"
    variables = {"CARRY": str(tmp_path / "carry")}
    done = bash("pack_checkout.sh", str(packed), **variables)
    total = packed.stat().st_size / 2**20 + 3
    assert done.returncode == 0, done.stdout
    assert f"{total:.1f} MiB  travel in all, at most 45 MiB" in done.stdout
    assert "3.0 MiB  carried: " in done.stdout
    with tarfile.open(packed) as archive:
        names = set(archive.getnames())
    assert {"setup.py", "vllm_kvpolicy/plugin.py", "csrc/bindings.cpp"} <= names
    assert not [name for name in names if name.startswith(("docs", "tests/golden"))]
    done = bash("pack_checkout.sh", str(packed), **variables, LIMIT_MIB=str(int(total)))
    assert done.returncode == 1


def test_a_missing_carry_folder_counts_nothing(tmp_path: Path) -> None:
    packed = tmp_path / "checkout.tar.xz"
    done = bash("pack_checkout.sh", str(packed), CARRY=str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout
    total = packed.stat().st_size / 2**20
    assert f"{total:.1f} MiB  travel in all" in done.stdout


def test_kernels_of_other_sources_do_not_travel(tmp_path: Path) -> None:
    words, carry = (str(tmp_path / "checkout.tar.xz"),), tmp_path / "carry"
    sources = carry / "kernels" / "sources"
    sources.parent.mkdir(parents=True)
    command = ["bash", "tools/gpu/digest.sh", "csrc", "setup.py"]
    sources.write_bytes(subprocess.check_output(command, cwd=ROOT))
    assert bash("pack_checkout.sh", *words, CARRY=str(carry)).returncode == 0
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


def test_imports_inside_functions_are_tried(tmp_path: Path, monkeypatch) -> None:
    """A note where an extra lacks; an error where a name is gone."""
    lines = "def f():\n import a.b\n def g():\n  from c import d, e\n"
    (tmp_path / "made.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    assert not imports.found("made", "f")
    assert set(imports.inside_functions("made")) == {
        ("a.b", ""),
        ("c", "d"),
        ("c", "e"),
    }
    with pytest.raises(ModuleNotFoundError, match="made.gone"):
        imports.found("made", "gone")
    monkeypatch.setattr(imports, "EXTRAS", ("such_a_package",))
    assert "NOT TRIED: such_a_package, " in imports.found("such_a_package", "x")[0]


@pytest.mark.slow
def test_everything_starts_where_only_what_travels_is(tmp_path: Path) -> None:
    """A broken part shows in the status, the others run all the same."""
    words = ("check", "min-32", "e")
    done = bash("rehearse.sh", *words, CARRY=str(tmp_path / "none"))
    assert done.returncode == 0, done.stdout[-5000:]
    for word in words:
        assert f"== {word}: status 0" in done.stdout
    assert "imports of flash" in done.stdout and "Part min-32:" in done.stdout
    done = bash("rehearse.sh", "no such part", CARRY=str(tmp_path / "none"))
    assert done.returncode == 1 and "invalid choice" in done.stdout
