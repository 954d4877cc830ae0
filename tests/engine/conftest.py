"""Settings of all engine tests: engines inside this process, one thread.

The tiny model is faster with one thread than with two, and a busy machine does not
slow it down. Set before torch starts its threads.
"""

import os
from collections.abc import Iterator

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
