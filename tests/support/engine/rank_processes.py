"""Starts the ranks of an engine from a process that has imported vLLM already.

vLLM starts each rank on a CPU as a new interpreter, which imports everything anew: more
than half of the time of a test of two ranks. A fork server imports once and computes
nothing, so that no thread pool runs when ranks are forked from it. What modules read of
the environment while they are imported is that of the first engine.
"""

import os
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from support.engine.collector import keep_imports_frozen

PRELOADED = (
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm_kvpolicy.worker.setup",
)


class RankProcess(ForkServerProcess):
    """A process with the environment of the one that starts it, not the server's."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        keep_imports_frozen()
        super().run()


class RankContext(ForkServerContext):
    """What `multiprocessing.get_context` would return."""

    Process = RankProcess


def context() -> Any:
    """Return the context of ranks, in place of vLLM's `get_mp_context`."""
    for name in PRELOADED:
        import_module(name)  # the server would leave out what it cannot import
    forkserver.set_forkserver_preload([*PRELOADED])
    return RankContext()
