"""The CUDA kernels compile, on machines without a GPU too.

For sm_90, and in `make test-all` for every architecture.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support import sweeps

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("80", "90", "100") if sweeps.every_name else ("90",)
TORCH_LIB = Path(torch.__file__).parent / "lib"
# What the kernels need of a PyTorch for CUDA; a PyTorch without lacks these.
OF_CUDA = {
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library as a wheel holds it, and what its build printed.

    Needs nvcc, of the machine or of the package nvidia-cuda-nvcc, and fails without.
    """
    folder = tmp_path_factory.mktemp("library")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ
        | {
            "KVPOLICY_CUDA": "1",
            "KVPOLICY_CUDA_ARCHITECTURES": " ".join(ARCHITECTURES),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    return folder / "vllm_kvpolicy" / "_C.abi3.so", done.stdout + done.stderr


def symbols(library: Path, *options: str) -> set[str]:
    """Return the dynamic symbols of a library."""
    answer = subprocess.run(
        ["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in answer.stdout.splitlines()}


@pytest.mark.timeout(1800)
def test_every_source_compiles(built: tuple[Path, str]) -> None:
    library, said = built
    names = [f"sm_{number}" for number in ARCHITECTURES]
    assert f"vllm-kvpolicy: with CUDA kernels for {', '.join(names)}: found" in said
    assert library.stat().st_size > 100_000
    for path in (ROOT / "csrc").glob("*.c*"):
        assert f"csrc/{path.name}" in said
    assert set(re.findall(r"code=(\w+)", said)) == {*names}


def test_the_library_needs_only_pytorchs_stable_interface(
    built: tuple[Path, str],
) -> None:
    library, _ = built
    needed = symbols(library, "--undefined-only")
    of_torch = {name for name in needed if re.match(r"(aoti_)?torch_", name)}
    assert of_torch >= OF_CUDA and "torch_library_impl" in of_torch
    offered = symbols(TORCH_LIB / "libtorch_cpu.so", "--defined-only")
    assert of_torch - offered <= OF_CUDA
    # Names of C++ in PyTorch change from release to release.
    assert not [name for name in needed if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
    assert not [name for name in needed if name.startswith(("Py", "_Py"))]


def test_kernels_know_nothing_of_pytorch() -> None:
    """The headers take raw pointers, so other programs can use them."""
    headers = list((ROOT / "csrc" / "include").rglob("*.cuh"))
    assert headers
    for path in headers:
        assert "torch" not in path.read_text()


def test_tokens_are_read_before_any_is_overwritten(
    setup: ModuleType, tmp_path: Path
) -> None:
    """A barrier stands between a tile's reads and its writes, of 16 bytes each."""
    source = tmp_path / "instance.cu"
    source.write_text(
        "#include <kvpolicy/compact_pages.cuh>\n"
        "template __global__ void kvpolicy::move_in_place<uint4>"
        "(kvpolicy::Moves, const int64_t*);\n"
    )
    command = [setup.find_nvcc(), "-std=c++17", "-arch=sm_90", "-ptx"]
    command += ["-I", ROOT / "csrc" / "include", "-o", "instance.ptx", source]
    subprocess.run(command, cwd=tmp_path, check=True)
    text = (tmp_path / "instance.ptx").read_text()
    found = re.findall(r"ld\.global\.v4|bar\.sync|st\.global\.v4", text)
    passes = found.index("bar.sync")
    assert passes > 0
    assert found == [
        *["ld.global.v4"] * passes,
        "bar.sync",
        *["st.global.v4"] * passes,
    ]


def make_torch(folder: Path, version: str, cuda: str | None) -> None:
    """Write what setup.py reads of an installed PyTorch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('imported')\n")
    text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
    (folder / "torch" / "version.py").write_text(text)


@pytest.fixture
def machine(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """setup.py on a machine with nvcc, g++ and no PyTorch."""
    for name in ("nvcc", "g++"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho compute_80\necho compute_90\n")
        program.chmod(0o755)
    with (tmp_path / "bin" / "nvcc").open("a") as file:
        file.write("echo compute_100\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in ("torch", "nvidia"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "missing"))
    monkeypatch.delenv("KVPOLICY_CUDA", raising=False)
    return setup


def test_pytorch_for_cuda_and_nvcc_make_a_wheel_with_kernels(
    machine: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    make_torch(tmp_path, "2.11.0+cu130", "13.0")
    (extension,) = machine.cuda_kernels()
    assert extension.name == "vllm_kvpolicy._C"
    assert {"csrc/bindings.cpp", "csrc/compact_pages.cu"} <= set(extension.sources)
    assert "with CUDA kernels for sm_80, sm_90, sm_100" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("version", "cuda", "wanted", "reason"),
    [
        (None, None, "", "there is no PyTorch"),
        ("2.13.0+cpu", None, "", "is not for CUDA"),
        ("2.9.1+cu128", "12.8", "", "older than 2.11"),
        ("2.13.0", "13.0", "0", "KVPOLICY_CUDA is 0"),
    ],
)
def test_other_machines_make_a_pure_wheel_and_say_why(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    version: str | None,
    cuda: str | None,
    wanted: str,
    reason: str,
) -> None:
    if version is not None:
        make_torch(tmp_path, version, cuda)
    monkeypatch.setenv("KVPOLICY_CUDA", wanted)
    assert machine.cuda_kernels() == []
    said = capfd.readouterr().err
    assert "vllm-kvpolicy: without CUDA kernels: " in said and reason in said


@pytest.mark.parametrize(
    ("program", "reason"), [("nvcc", "there is no nvcc"), ("g++", "there is no g++")]
)
def test_without_a_compiler_the_wheel_is_pure_unless_kernels_are_asked_for(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    program: str,
    reason: str,
) -> None:
    make_torch(tmp_path, "2.13.0", "13.0")
    (tmp_path / "bin" / program).unlink()
    assert machine.cuda_kernels() == [] and reason in capfd.readouterr().err
    monkeypatch.setenv("KVPOLICY_CUDA", "1")
    with pytest.raises(SystemExit, match=re.escape(reason)):
        machine.cuda_kernels()


def test_nvcc_of_the_package_is_found(machine: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "bin" / "nvcc").rename(folder / "nvcc")
    assert machine.find_nvcc() == folder / "nvcc"
    (folder / "nvcc").write_text("#!/bin/sh\necho compute_80\n")
    with pytest.raises(machine.CannotBuild, match="does not know sm_90"):
        machine.find_nvcc()


def test_another_wish_is_an_error(
    machine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOLICY_CUDA", "yes")
    with pytest.raises(SystemExit, match="KVPOLICY_CUDA: expected 0 or 1, got 'yes'"):
        machine.cuda_kernels()


def test_all_locks_pin_one_compiler() -> None:
    """Pip refuses to install two locks that pin a package twice, differently."""
    pins = [
        dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))
        for path in (ROOT / "requirements" / f"{lock}.txt" for lock in ("dev", "cuda"))
    ]
    shared = pins[0].keys() & pins[1].keys()
    assert {"nvidia-cuda-nvcc", "nvidia-nvvm"} <= shared
    assert {name: pins[0][name] for name in shared} == {
        name: pins[1][name] for name in shared
    }
