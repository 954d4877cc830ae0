"""The kernels for CPUs compile with g++ by the documented command, and load."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vllm_kvpolicy.kernels.libraries import CPU, digest_of

ROOT = Path(__file__).parents[2]
TORCH_LIB = Path(torch.__file__).parent / "lib"
USE = """
import sys
from pathlib import Path
import torch
from vllm_kvpolicy.kernels.libraries import CPU
from vllm_kvpolicy.kernels.ranking import top_k_mask
CPU.path = Path(sys.argv[1])
every = torch.ones(1, 5, dtype=torch.bool)
score = torch.tensor([[3.0, 1.0, 4.0, 1.0, 5.0]])
print(top_k_mask(score, ~every, every, 3).int().tolist(), top_k_mask.calls)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library as a wheel holds it, and what its build printed.

    Needs g++, as `make setup` on a CPU does, and fails without.
    """
    folder = tmp_path_factory.mktemp("library")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "KVPOLICY_CPU": "1", "KVPOLICY_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    return folder / "vllm_kvpolicy" / "_C_cpu.abi3.so", done.stdout + done.stderr


def symbols(library: Path, *options: str) -> set[str]:
    """Return the dynamic symbols of a library."""
    answer = subprocess.run(
        ["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in answer.stdout.splitlines()}


@pytest.mark.timeout(1200)
def test_the_build_makes_a_library_of_every_source(built: tuple[Path, str]) -> None:
    library, said = built
    assert "vllm-kvpolicy: with CPU kernels: found" in said
    assert "vllm-kvpolicy: without CUDA kernels: KVPOLICY_CUDA is 0" in said
    assert library.exists()
    for path in (ROOT / "csrc" / "cpu").glob("*.cpp"):
        assert f"csrc/cpu/{path.name}" in said


def test_it_needs_only_pytorchs_stable_interface(built: tuple[Path, str]) -> None:
    needed = symbols(built[0], "--undefined-only")
    of_torch = {name for name in needed if re.match(r"(aoti_)?torch_", name)}
    assert "torch_parallel_for" in of_torch and "torch_library_impl" in of_torch
    assert of_torch <= symbols(TORCH_LIB / "libtorch_cpu.so", "--defined-only")
    # Names of C++ in PyTorch change from release to release.
    assert not [name for name in needed if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
    assert not [name for name in needed if name.startswith(("Py", "_Py"))]


def test_operations_run_in_it(built: tuple[Path, str]) -> None:
    """In a process of its own, which loads this library and no other."""
    command = [sys.executable, "-c", USE, str(built[0])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[[1, 0, 1, 0, 1]] Counter({'cpu': 1})", done.stderr


# Kinds of csrc/cpu/each_cpu.h, and what a CPU has to say that it can run them.
KINDS = {"any": "", "new_enough": "avx2", "newer": "avx512bw", "newest": "avx512_bf16"}
TEST = """
import sys
from pathlib import Path
import pytest
from vllm_kvpolicy.kernels.libraries import CPU
CPU.path = Path(sys.argv[1])
sys.exit(pytest.main(["-q", "tests/kernels/test_window_usage_cpp.py"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cpu_measures_the_same(
    setup: ModuleType, tmp_path: Path, kind: str
) -> None:
    """The tests of window attention, in a library of one kind."""
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() != "x86_64" and kind != "any":
        pytest.skip("the other kinds are of x86-64")
    if KINDS[kind] not in flags:
        pytest.skip(f"this CPU has no {KINDS[kind]}")
    library = tmp_path / "kind.so"
    command = setup.cpp_command(setup.find_cxx(), setup.find_torch(with_cuda=False))
    sources = [f"csrc/cpu/{name}.cpp" for name in ("bindings", "window_usage")]
    command += ["-shared", "-o", str(library), f"-DKVPOLICY_ONLY={kind}", *sources]
    command += ["-Xlinker", "--no-as-needed", f"-L{TORCH_LIB}", "-ltorch"]
    subprocess.run(command, cwd=ROOT, check=True)
    done = subprocess.run(
        [sys.executable, "-c", TEST, str(library)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


def make_torch(folder: Path, version: str) -> None:
    """Write what setup.py reads of an installed PyTorch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('imported')\n")
    text = f"__version__ = {version!r}\ncuda = None\n"
    (folder / "torch" / "version.py").write_text(text)


@pytest.fixture
def machine(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """setup.py on a machine with g++ and no PyTorch."""
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("KVPOLICY_CPU", raising=False)
    return setup


def test_a_compiler_and_pytorch_make_a_wheel_with_kernels(
    machine: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    make_torch(tmp_path, "2.11.0+cpu")
    (extension,) = machine.cpu_kernels()
    assert extension.name == "vllm_kvpolicy._C_cpu"
    assert {"csrc/cpu/bindings.cpp", "csrc/cpu/ranking.cpp"} <= set(extension.sources)
    assert "csrc/cpu/window_rows.h" in extension.depends
    assert "with CPU kernels: found" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("version", "wanted", "reason"),
    [
        (None, "", "there is no PyTorch"),
        ("2.9.1+cpu", "", "older than 2.11"),
        ("2.13.0+cpu", "0", "KVPOLICY_CPU is 0"),
    ],
)
def test_other_machines_make_a_wheel_without_and_say_why(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    version: str | None,
    wanted: str,
    reason: str,
) -> None:
    if version is not None:
        make_torch(tmp_path, version)
    monkeypatch.setenv("KVPOLICY_CPU", wanted)
    assert machine.cpu_kernels() == []
    said = capfd.readouterr().err
    assert "vllm-kvpolicy: without CPU kernels: " in said and reason in said


def test_kernels_that_are_asked_for_need_a_compiler(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    make_torch(tmp_path, "2.13.0")
    (tmp_path / "bin" / "g++").unlink()
    assert machine.cpu_kernels() == []
    assert "without CPU kernels: there is no g++" in capfd.readouterr().err
    monkeypatch.setenv("KVPOLICY_CPU", "1")
    with pytest.raises(SystemExit, match="although asked for: there is no g"):
        machine.cpu_kernels()
    monkeypatch.setenv("KVPOLICY_CPU", "yes")
    with pytest.raises(SystemExit, match="KVPOLICY_CPU: expected 0 or 1, got 'yes'"):
        machine.cpu_kernels()


def test_a_compiler_that_fails_makes_a_wheel_without(tmp_path: Path) -> None:
    """Such as one that does not know the newest kinds of CPUs; =1 demands them."""
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'unknown target' >&2\nexit 1\n")
    program.chmod(0o755)
    found = {}
    for wanted in ("", "1"):
        folder = tmp_path / f"build{wanted}"
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)],
            cwd=ROOT,
            env={
                **os.environ,
                "PATH": f"{program.parent}:{os.environ['PATH']}",
                "KVPOLICY_CPU": wanted,
                "KVPOLICY_CUDA": "0",
            },
            capture_output=True,
            text=True,
        )
        found[wanted] = done
        assert "unknown target" in done.stderr
        assert not list(folder.rglob("*.so"))
    assert found[""].returncode == 0, found[""].stderr
    assert (
        "going on without vllm_kvpolicy._C_cpu" in found[""].stdout + found[""].stderr
    )
    assert found["1"].returncode != 0
    assert "g++ failed; its message is above" in found["1"].stderr


def test_a_library_of_other_sources_is_refused(
    built: tuple[Path, str], tmp_path: Path
) -> None:
    """Its operations would fail in the middle of an event, or do something else."""
    sources = tmp_path / "cpu"
    shutil.copytree(ROOT / "csrc" / "cpu", sources)
    assert digest_of(sources).encode() in built[0].read_bytes()
    with (sources / "best.h").open("a") as file:
        file.write("// changed\n")
    with pytest.raises(ImportError, match="other sources than this checkout; to build"):
        replace(CPU, path=built[0], sources=sources).load()
