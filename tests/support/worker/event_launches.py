"""Counts what a batch of events costs: operators, Triton launches and copies."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from support.worker.event_world import World
from vllm_kvpolicy.kernels.dispatch import forced
from vllm_kvpolicy.worker import transfer

EVENTS_BEFORE = 2  # of each request: the counted ones find survivors
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")
COPY = "copy to the device"


class Launches(TorchDispatchMode):
    """Counts by name what a GPU would be asked to do.

    That is every PyTorch operator that computes, every Triton kernel and every copy of
    host integers. A kernel under the interpreter counts once, whatever it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if not (self._in_kernel or func.is_view or name in FREE):
            self.counts[name] += 1
        return func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count until the end of the block."""
        run, copy = GridExecutor.__call__, transfer.to_device

        def launch(grid: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[f"triton {grid.fn.__name__}"] += 1
            self._in_kernel = True
            try:
                return run(grid, *args, **kwargs)
            finally:
                self._in_kernel = False

        def send(*args: Any) -> torch.Tensor:
            self.counts[COPY] += 1
            return copy(*args)

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(GridExecutor, "__call__", launch)
            for module in _modules_with(copy):
                patch.setattr(module, "to_device", send)
            yield


def _modules_with(function: Callable[..., Any]) -> Iterator[Any]:
    """Yield the package's modules that call a function of `transfer` by its name."""
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("vllm_kvpolicy.worker")
        if is_ours and getattr(module, function.__name__, None) is function:
            yield module


def count_launches(name: str, **options: Any) -> Counter[str]:
    """Return what the third events of two requests cost, in one batch.

    Args:
        name: the policy.
        options: the policy's own, defaults apart.
    """
    generator = torch.Generator().manual_seed(5)
    counter = Launches()
    with forced("reference"):
        world = World(name, "cpu", partial(torch.randn, generator=generator), **options)
        for ordinal in range(EVENTS_BEFORE):
            world.step(ordinal)
    with forced("triton"):
        events = world.events(EVENTS_BEFORE)
        with counter.watching():
            world.compactor.run(events)
    return counter.counts
