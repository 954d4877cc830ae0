"""Settings of all engine tests: engines inside this process, one thread.

The tiny model is faster with one thread than with two, and a busy machine does not
slow it down. Set before torch starts its threads.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Let torch and the CPU kernels use one thread."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ranks_from_a_fork_server() -> Iterator[None]:
    """Let engines of several ranks start them without importing vLLM for each."""
    from vllm.v1.executor import multiproc_executor

    from support.engine.rank_processes import context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "get_mp_context", context)
        yield


@pytest.fixture(scope="session")
def decoder(tiny_model: Path):
    """The reference decoder of the tiny model."""
    from support.engine.reference_decoder import ReferenceDecoder

    return ReferenceDecoder(tiny_model)


@pytest.fixture(scope="session")
def folders(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return what finds the folder of a model, the tiny one or a made one."""
    from support.made_hybrids import make

    @cache
    def folder(name: str) -> Path:
        is_tiny = name == "tiny_model"
        return tiny_model if is_tiny else make(name, tmp_path_factory.mktemp(name))

    return folder
