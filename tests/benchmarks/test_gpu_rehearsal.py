"""The rehearsal of a GPU run, and what of a checkout travels to it."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
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
