"""Fixtures of the CUDA sources: setup.py as a module, and the kernels on a CPU."""

import ctypes
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced, poisoned
from support.cuda_on_fibres_library import ORDERS, build
from vllm_kvpolicy.kernels.libraries import CUDA

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def setup() -> ModuleType:
    """setup.py as a module, which builds nothing."""
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def library_on_cpu(
    setup: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ctypes.CDLL]:
    """The library of csrc/ for a CPU, loaded; fails without g++."""
    if torch.cuda.is_available() and CUDA.path.exists():
        pytest.skip("a process has one of both, and tests/gpu runs the one for GPUs")
    path = build(setup, tmp_path_factory.mktemp("cuda_on_fibres"))
    torch.ops.load_library(str(path))
    return path, ctypes.CDLL(str(path))


@pytest.fixture(params=ORDERS)
def on_fibres(
    library_on_cpu: tuple[Path, ctypes.CDLL],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Run operations in CUDA C++ on this CPU, threads in one order.

    Fresh memory is poisoned: True in masks and the highest number in integers.
    """
    path, fibres = library_on_cpu
    monkeypatch.setattr(CUDA, "path", path)
    fibres.set_order(request.param)
    with forced("cuda"), poisoned():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers, other ones each time."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")  # pytest shows it where a test fails
    return torch.Generator().manual_seed(seed)
