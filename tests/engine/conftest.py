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
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 folder, see `commands.trials`."""
    from vllm_kvpolicy.commands.trials import make_gemma3

    return make_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LFM2 folder: two layers of full attention, four with a state."""
    from support.made_hybrids import make

    return make("lfm2", tmp_path_factory.mktemp("lfm2"))


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss folder, see `support.made_sinks`."""
    from support.made_sinks import make_gpt_oss

    return make_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="session")
def reversed_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 whose first layer is one of full attention."""
    from support.made_sliding import PATTERN
    from vllm_kvpolicy.commands.trials import make_gemma3

    return make_gemma3(tmp_path_factory.mktemp("gemma3"), pattern=PATTERN[::-1])


@pytest.fixture(scope="session")
def folders(request, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what finds the folder of a model, a fixture's or one that it writes."""
    from support.made_hybrids import FAMILIES, make

    @cache
    def folder(name: str) -> Path:
        if name in FAMILIES:
            return make(name, tmp_path_factory.mktemp(name))
        return request.getfixturevalue(name)

    return folder
