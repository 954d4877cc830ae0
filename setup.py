"""Build description of the distribution `vllm-kvpolicy`.

The wheel is pure Python, or holds kernels as well (`pip install --no-build-isolation`):
in C++ for the CPU where the environment that builds it has g++ and PyTorch, in CUDA C++
where it has nvcc, g++ and PyTorch for CUDA. KVPOLICY_CPU=0 and KVPOLICY_CUDA=0 never
build them; with 1 the build fails where it cannot, and KVPOLICY_CUDA=1 takes a PyTorch
without CUDA too, whose headers are enough. KVPOLICY_CUDA_ARCHITECTURES="80 90" compiles
for fewer kinds of GPUs. The build says what it holds and why.
"""

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).resolve().parent
LIBRARIES = HERE / "vllm_kvpolicy" / "kernels" / "libraries.py"
DIGEST_OF = runpy.run_path(str(LIBRARIES))["digest_of"]
README = HERE / "README.md"
WANTED = os.environ.get("KVPOLICY_CUDA_ARCHITECTURES", "80 90 100")
CUDA_ARCHITECTURES = tuple(map(int, WANTED.split()))
# The oldest PyTorch that the kernels load in; later ones keep its stable ABI.
MIN_TORCH = (2, 11)
TARGET = f"-DTORCH_TARGET_VERSION={MIN_TORCH[0] << 56 | MIN_TORCH[1] << 48:#x}"
CXX_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DUSE_CUDA",
    # nvcc may be a minor version ahead of the runtime that PyTorch pins.
    "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK",
    TARGET,
)
# For any CPU of its kind: csrc/cpu compiles what is worth it for newer ones as well.
CPU_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", TARGET)


class CannotBuild(Exception):
    """Why this environment builds no kernels, as the end of a sentence."""


def find_nvcc() -> Path:
    """Return nvcc of CUDA_HOME or of PATH, else of the package nvidia-cuda-nvcc.

    Raises:
        CannotBuild: there is none, or it does not know all architectures.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [Path(home) / "bin" / "nvcc"]
    if found := shutil.which("nvcc"):
        places.append(Path(found))
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        places += sorted(Path(folder).glob("cu*/bin/nvcc"))
    nvcc = next((place for place in places if place.exists()), None)
    if nvcc is None:
        raise CannotBuild("there is no nvcc")
    answer = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    for number in CUDA_ARCHITECTURES:
        if f"compute_{number}\n" not in answer.stdout:
            raise CannotBuild(f"{nvcc} does not know sm_{number}")
    return nvcc


def find_cxx() -> Path:
    """Return g++.

    Raises:
        CannotBuild: there is none.
    """
    found = shutil.which("g++")
    if found is None:
        raise CannotBuild("there is no g++")
    return Path(found)


def find_torch(with_cuda: bool) -> Path:
    """Return the folder of PyTorch without importing it.

    Args:
        with_cuda: only of a PyTorch for CUDA.

    Raises:
        CannotBuild: there is none, or it is too old.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("there is no PyTorch in the environment that builds")
    folder = Path(spec.origin).parent
    facts = runpy.run_path(str(folder / "version.py"))
    version = tuple(int(part) for part in facts["__version__"].split(".")[:2])
    if version < MIN_TORCH:
        raise CannotBuild(f"PyTorch is {facts['__version__']}, older than 2.11")
    if with_cuda and facts["cuda"] is None:
        raise CannotBuild(f"PyTorch {facts['__version__']} is not for CUDA")
    return folder


def nvcc_command(nvcc: Path, torch: Path) -> list[str]:
    """Return the start of a command that compiles for every architecture.

    Args:
        nvcc: the compiler.
        torch: folder of PyTorch.
    """
    command = [str(nvcc), *CXX_FLAGS, "-Xcompiler", "-fPIC", of_sources("csrc")]
    for folder in (torch.parent, HERE):
        command += ["-Xcompiler", without(folder)]
    command += ["-I", str(HERE / "csrc" / "include"), "-I", str(torch / "include")]
    for number in CUDA_ARCHITECTURES:
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    return command


def of_sources(folder: str) -> str:
    """Return the flag that writes into a library which sources it is built of."""
    return f'-DKVPOLICY_SOURCES="{DIGEST_OF(HERE / folder)}"'


def without(folder: Path) -> str:
    """Return the flag that keeps a folder of this machine out of a library's texts."""
    return f"-fmacro-prefix-map={folder}/="


def say(message: str) -> None:
    """Print one line where it is in nobody's way."""
    print(f"vllm-kvpolicy: {message}", file=sys.stderr)


def cpp_command(cxx: Path, torch: Path) -> list[str]:
    """Return the start of a command that compiles for a CPU.

    Args:
        cxx: the compiler.
        torch: folder of PyTorch.
    """
    command = [str(cxx), *CPU_FLAGS, of_sources("csrc/cpu"), without(torch.parent)]
    return [*command, "-I", str(torch / "include")]


def demand(variable: str) -> str:
    """Return what an environment variable says about kernels: "", "0" or "1".

    Raises:
        SystemExit: it says something else.
    """
    wanted = os.environ.get(variable, "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"{variable}: expected 0 or 1, got {wanted!r}")
    return wanted


def cpu_kernels() -> list[Extension]:
    """Return the extension with the kernels for a CPU, or nothing, and say why.

    Raises:
        SystemExit: KVPOLICY_CPU asks for kernels that cannot be built.
    """
    wanted = demand("KVPOLICY_CPU")
    try:
        if wanted == "0":
            raise CannotBuild("KVPOLICY_CPU is 0")
        cxx, torch = find_cxx(), find_torch(with_cuda=False)
    except CannotBuild as reason:
        if wanted == "1":
            sys.exit(f"vllm-kvpolicy: no CPU kernels although asked for: {reason}")
        say(f"without CPU kernels: {reason}")
        return []
    say(f"with CPU kernels: found {cxx} and {torch}")
    folder = HERE / "csrc" / "cpu"
    return [extension("vllm_kvpolicy._C_cpu", folder, ["*.cpp"], wanted != "1")]


def cuda_kernels() -> list[Extension]:
    """Return the extension with the CUDA kernels, or nothing, and say why.

    Raises:
        SystemExit: KVPOLICY_CUDA asks for kernels that cannot be built.
    """
    wanted = demand("KVPOLICY_CUDA")
    try:
        if wanted == "0":
            raise CannotBuild("KVPOLICY_CUDA is 0")
        nvcc, torch = find_nvcc(), find_torch(with_cuda=wanted != "1")
        find_cxx()
    except CannotBuild as reason:
        if wanted == "1":
            sys.exit(f"vllm-kvpolicy: no CUDA kernels although asked for: {reason}")
        say(f"without CUDA kernels: {reason}")
        return []
    names = ", ".join(f"sm_{number}" for number in CUDA_ARCHITECTURES)
    say(f"with CUDA kernels for {names}: found {nvcc} and {torch}")
    patterns = ["bindings.cpp", "*.cu"]
    return [extension("vllm_kvpolicy._C", HERE / "csrc", patterns, wanted != "1")]


def extension(
    name: str, folder: Path, patterns: list[str], is_optional: bool
) -> Extension:
    """Return a library of the sources in a folder that match one of the patterns.

    Args:
        name: module name of the library.
        folder: of the sources.
        patterns: of their names.
        is_optional: whether a build that fails goes on without it.
    """
    sources = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return Extension(
        name,
        [str(path.relative_to(HERE)) for path in sources],
        depends=[str(path.relative_to(HERE)) for path in folder.rglob("*.*h")],
        py_limited_api=True,
        optional=is_optional,
    )


class BuildKernels(build_ext):
    """Makes one library of all sources of an extension.

    It holds nothing of Python's: PyTorch loads it by its path, and it finds what it
    needs behind libtorch.so, which a PyTorch without CUDA has as well.
    """

    def build_extension(self, ext: Extension) -> None:
        """Compile and link with g++, or with nvcc, one architecture after the other."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        torch = find_torch(with_cuda=False)
        if ext.name.endswith("_cpu"):
            command = cpp_command(find_cxx(), torch)
        else:
            command = nvcc_command(find_nvcc(), torch)
        command += ["-shared", "-o", str(target), *ext.sources]
        command += ["-Xlinker", "--no-as-needed", f"-L{torch / 'lib'}", "-ltorch"]
        print(" ".join(command))
        if subprocess.run(command, cwd=HERE).returncode:
            if not ext.optional:
                sys.exit(f"vllm-kvpolicy: {command[0]} failed; its message is above")
            raise CompileError(f"{command[0]} failed; going on without {ext.name}")


if __name__ == "__main__":
    EXTENSIONS = cpu_kernels() + cuda_kernels()
    setup(
        name="vllm-kvpolicy",
        # That of vLLM's minor release, whose tests it passes, and a number of ours.
        version="0.32.0",
        description="Bounded, well-chosen KV caches for vLLM: one flag, "
        "memory returned",
        long_description=README.read_text() if README.exists() else "",
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        packages=find_packages(include=["vllm_kvpolicy", "vllm_kvpolicy.*"]),
        package_data={"vllm_kvpolicy.observe": ["page.html"]},
        python_requires=">=3.11",
        # vLLM is no hard dependency: the CPU and the CUDA wheel have different names,
        # and a plugin changes no other package. `compat.missing_vllm` says what to do.
        install_requires=[],
        extras_require={
            "cuda": ["vllm==0.32.0"],
            "dev": [
                "accelerate",
                "allpairspy",
                "gguf",
                "hypothesis",
                "ipykernel",
                "math-verify",
                "matplotlib",
                "mkdocs-material",
                "mypy",
                "nbclient",
                "nbformat",
                "playwright",
                "pytest",
                "pytest-timeout",
                "pytest-xdist",
                "ruff",
            ],
            # Of the benchmarks in a checkout; vLLM brings the rest.
            "bench": ["gguf", "math-verify", "pyyaml"],
            # Of `vllm-kvpolicy trace plot`, and of `top` where there is no vLLM.
            "plot": ["matplotlib"],
            "top": ["rich"],
            # Attention by others, with which tests on a GPU compare ours. The wheel of
            # xFormers is built for CUDA 12.
            "flashinfer": ["flashinfer-python==0.7.0.post1"],
            "xformers": ["nvidia-cuda-runtime-cu12==12.9.79", "xformers==0.0.35"],
        },
        ext_modules=EXTENSIONS,
        cmdclass={"build_ext": BuildKernels},
        # The library serves every Python: it holds nothing of any.
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if EXTENSIONS else {},
        entry_points={
            "vllm.general_plugins": ["kvpolicy = vllm_kvpolicy.plugin:register"],
            "console_scripts": ["vllm-kvpolicy = vllm_kvpolicy.__main__:main"],
        },
    )
