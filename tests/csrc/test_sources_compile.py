"""The kernels compile by the documented command, and load: with g++, and with nvcc.

CUDA sources compile without a GPU too, for sm_90 and in `make test-all` for every
architecture. The library for CPUs is the checkout's own, which says of which sources
`make setup` has built it; `make test-all` builds it anew.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support import sweeps
from vllm_kvpolicy.kernels.libraries import CPU, digest_of

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("80", "90", "100") if sweeps.every_name else ("90",)
TORCH_LIB = Path(torch.__file__).parent / "lib"
# What the kernels need of a PyTorch for CUDA; a PyTorch without lacks these.
OF_CUDA = {
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
}
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


@dataclass(frozen=True)
class Built:
    """The libraries as a wheel holds them, and what their build printed."""

    cpu: Path
    cuda: Path
    said: str


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build what the environment asks for."""
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Needs g++, and nvcc of the machine or of the package nvidia-cuda-nvcc."""
    folder = tmp_path_factory.mktemp("library")
    done = build(
        folder,
        KVPOLICY_CPU=str(int(sweeps.every_name)),
        KVPOLICY_CUDA="1",
        KVPOLICY_CUDA_ARCHITECTURES=" ".join(ARCHITECTURES),
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    package = folder / "vllm_kvpolicy"
    cpu = package / "_C_cpu.abi3.so" if sweeps.every_name else CPU.path
    return Built(cpu, package / "_C.abi3.so", done.stdout + done.stderr)


def symbols(library: Path, *options: str) -> set[str]:
    """Return the dynamic symbols of a library."""
    answer = subprocess.run(
        ["nm", "-D", *options, str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in answer.stdout.splitlines()}


@pytest.mark.timeout(1800)
def test_the_build_makes_libraries_of_every_source(built: Built) -> None:
    said, folders = built.said, ["csrc"]
    if sweeps.every_name:
        folders.append("csrc/cpu")
    assert ("vllm-kvpolicy: with CPU kernels: found" in said) == sweeps.every_name
    names = [f"sm_{number}" for number in ARCHITECTURES]
    assert f"vllm-kvpolicy: with CUDA kernels for {', '.join(names)}: found" in said
    assert built.cuda.stat().st_size > 100_000
    assert set(re.findall(r"code=(\w+)", said)) == {*names}
    for folder in folders:
        for path in (ROOT / folder).glob("*.c*"):
            assert f"{folder}/{path.name}" in said


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_they_need_only_pytorchs_stable_interface(built: Built, kind: str) -> None:
    needed = symbols(getattr(built, kind), "--undefined-only")
    of_torch = {name for name in needed if re.match(r"(aoti_)?torch_", name)}
    is_cuda = kind == "cuda"
    assert of_torch >= (OF_CUDA if is_cuda else {"torch_parallel_for"})
    assert "torch_library_impl" in of_torch
    lacking = of_torch - symbols(TORCH_LIB / "libtorch_cpu.so", "--defined-only")
    assert lacking <= (OF_CUDA if is_cuda else set())
    # Names of C++ in PyTorch change from release to release.
    assert not [name for name in needed if re.match(r"_ZN?K?(2at|3c10|5torch)", name)]
    assert not [name for name in needed if name.startswith(("Py", "_Py"))]


def test_operations_run_in_the_one_for_cpus(built: Built) -> None:
    """In a process of its own, which loads this library and no other."""
    command = [sys.executable, "-c", USE, str(built.cpu)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[[1, 0, 1, 0, 1]] Counter({'cpu': 1})", done.stderr


def test_a_library_of_other_sources_is_refused(built: Built, tmp_path: Path) -> None:
    """Its operations would fail in the middle of an event, or do something else."""
    sources = tmp_path / "cpu"
    shutil.copytree(ROOT / "csrc" / "cpu", sources)
    assert digest_of(sources).encode() in built.cpu.read_bytes()
    with (sources / "best.h").open("a") as file:
        file.write("// changed\n")
    unloaded = Path(shutil.copy(built.cpu, tmp_path))
    with pytest.raises(ImportError, match="other sources than this checkout; to build"):
        replace(CPU, path=unloaded, sources=sources).load()


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
    assert found == [*["ld.global.v4"] * passes, "bar.sync", *["st.global.v4"] * passes]


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


# -- what other machines build ---------------------------------------------------------


def make_torch(folder: Path, version: str, cuda: str | None) -> None:
    """Write what setup.py reads of an installed PyTorch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('imported')\n")
    text = f"__version__ = {version!r}\ncuda = {cuda!r}\n"
    (folder / "torch" / "version.py").write_text(text)


KERNELS = {"CPU": "cpu_kernels", "CUDA": "cuda_kernels"}


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
    for kind in KERNELS:
        monkeypatch.delenv(f"KVPOLICY_{kind}", raising=False)
    return setup


def test_a_compiler_and_pytorch_make_a_wheel_with_kernels(
    machine: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    make_torch(tmp_path, "2.11.0+cu130", "13.0")
    (extension,) = machine.cpu_kernels()
    assert extension.name == "vllm_kvpolicy._C_cpu"
    assert {"csrc/cpu/bindings.cpp", "csrc/cpu/ranking.cpp"} <= set(extension.sources)
    assert "csrc/cpu/window_rows.h" in extension.depends
    (extension,) = machine.cuda_kernels()
    assert extension.name == "vllm_kvpolicy._C"
    assert {"csrc/bindings.cpp", "csrc/compact_pages.cu"} <= set(extension.sources)
    said = capfd.readouterr().err
    assert "with CPU kernels: found" in said
    assert "with CUDA kernels for sm_80, sm_90, sm_100" in said


@pytest.mark.parametrize(
    ("kind", "version", "cuda", "wanted", "reason"),
    [
        ("CPU", None, None, "", "there is no PyTorch"),
        ("CPU", "2.9.1+cpu", None, "", "older than 2.11"),
        ("CPU", "2.13.0+cpu", None, "0", "KVPOLICY_CPU is 0"),
        ("CUDA", None, None, "", "there is no PyTorch"),
        ("CUDA", "2.13.0+cpu", None, "", "is not for CUDA"),
        ("CUDA", "2.9.1+cu128", "12.8", "", "older than 2.11"),
        ("CUDA", "2.13.0", "13.0", "0", "KVPOLICY_CUDA is 0"),
    ],
)
def test_other_machines_make_a_wheel_without_and_say_why(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    kind: str,
    version: str | None,
    cuda: str | None,
    wanted: str,
    reason: str,
) -> None:
    if version is not None:
        make_torch(tmp_path, version, cuda)
    monkeypatch.setenv(f"KVPOLICY_{kind}", wanted)
    assert getattr(machine, KERNELS[kind])() == []
    said = capfd.readouterr().err
    assert f"vllm-kvpolicy: without {kind} kernels: " in said and reason in said


@pytest.mark.parametrize(
    ("kind", "program"), [("CPU", "g++"), ("CUDA", "nvcc"), ("CUDA", "g++")]
)
def test_kernels_that_are_asked_for_need_a_compiler(
    machine: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    kind: str,
    program: str,
) -> None:
    make_torch(tmp_path, "2.13.0", "13.0")
    (tmp_path / "bin" / program).unlink()
    kernels, reason = getattr(machine, KERNELS[kind]), f"there is no {program}"
    assert kernels() == [] and reason in capfd.readouterr().err
    monkeypatch.setenv(f"KVPOLICY_{kind}", "1")
    with pytest.raises(SystemExit, match=f"although asked for: {re.escape(reason)}"):
        kernels()
    monkeypatch.setenv(f"KVPOLICY_{kind}", "yes")
    with pytest.raises(SystemExit, match=f"KVPOLICY_{kind}: expected 0 or 1, got 'yes"):
        kernels()


def test_nvcc_of_the_package_is_found(machine: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "bin" / "nvcc").rename(folder / "nvcc")
    assert machine.find_nvcc() == folder / "nvcc"
    (folder / "nvcc").write_text("#!/bin/sh\necho compute_80\n")
    with pytest.raises(machine.CannotBuild, match="does not know sm_90"):
        machine.find_nvcc()


def test_a_compiler_that_fails_makes_a_wheel_without(tmp_path: Path) -> None:
    """Such as one that does not know the newest kinds of CPUs; =1 demands them."""
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'unknown target' >&2\nexit 1\n")
    program.chmod(0o755)
    found = {}
    for wanted in ("", "1"):
        folder = tmp_path / f"build{wanted}"
        path = f"{program.parent}:{os.environ['PATH']}"
        done = build(folder, PATH=path, KVPOLICY_CPU=wanted, KVPOLICY_CUDA="0")
        found[wanted] = done
        assert "unknown target" in done.stderr
        assert not list(folder.rglob("*.so"))
    assert found[""].returncode == 0, found[""].stderr
    assert (
        "going on without vllm_kvpolicy._C_cpu" in found[""].stdout + found[""].stderr
    )
    assert found["1"].returncode != 0
    assert "g++ failed; its message is above" in found["1"].stderr


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
