"""Builds the CUDA sources for a CPU, where each thread of a block is a fibre.

The sources are those that nvcc compiles, unchanged; cuda_on_fibres/ holds headers in
CUDA's place. Called by the fixtures in conftest and by test_fibres.
"""

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "csrc" / "cuda_on_fibres"
TORCH = Path(torch.__file__).parent
ORDERS = (0, 1, 2)  # lowest thread first, highest first, by chance


def find_compiler() -> str:
    """Return the path of g++, which setup.py needs as well.

    Raises:
        AssertionError: there is none.
    """
    found = shutil.which("g++")
    assert found, "there is no g++, which compiles csrc/ for a CPU"
    return found


def command_of(setup: ModuleType) -> list[str]:
    """Return the compiler's options: those of setup.py, and the headers' folders."""
    folders = STAND_INS, ROOT / "csrc" / "include", TORCH / "include"
    includes = [f"-I{folder}" for folder in folders]
    sources = setup.of_sources("csrc")
    return [*setup.CXX_FLAGS, "-O1", "-fPIC", sources, *includes]


def build(setup: ModuleType, folder: Path) -> Path:
    """Compile csrc/; return the library.

    Raises:
        AssertionError: there is no g++, or the sources do not compile.
    """
    start = [find_compiler(), *command_of(setup)]
    prelude = ["-x", "c++", "-include", str(STAND_INS / "tensors_on_cpu.h")]
    jobs = {STAND_INS / "fibres.cpp": start}
    for source in sorted((ROOT / "csrc").glob("*.c*")):
        jobs[source] = start + prelude
    running = []
    for source, command in jobs.items():
        made = folder / f"{source.stem}.o"
        command = [*command, "-c", str(source), "-o", str(made)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running.append((made, process))
    for made, process in running:
        said = process.communicate()[1]
        assert process.returncode == 0, f"{made.name}: {said[-10_000:]}"
    library = folder / "cuda_on_fibres.so"
    link = [
        start[0],
        "-shared",
        "-o",
        str(library),
        *(str(made) for made, _ in running),
    ]
    # It finds libtorch by its name, as the library for GPUs does.
    link += ["-Wl,--no-as-needed", f"-L{TORCH / 'lib'}", "-ltorch"]
    subprocess.run(link, check=True)
    return library
