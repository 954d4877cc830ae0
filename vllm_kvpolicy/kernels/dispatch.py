"""Operations: a PyTorch reference and faster twins of one name, signature and result.

`preferences` says which of them runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

import torch

from vllm_kvpolicy.kernels.preferences import IMPLEMENTATIONS, has, implementation_of

P = ParamSpec("P")
R = TypeVar("R")
_forced: ContextVar[str | None] = ContextVar("implementation", default=None)


class Operation(Generic[P, R]):
    """Calls the implementation for the device of its first tensor.

    Args:
        reference: a function called NAME_ref, in module kernels.STEM. NAME is one of
            `preferences.OPERATIONS`. Its twins are NAME in kernels.triton.STEM and,
            where `preferences.IN_CPP` says so, in kernels.cuda and kernels.cpu.

    Attributes:
        calls: how often each implementation has run in this process.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self.name = self.__name__ = reference.__name__.removesuffix("_ref")
        self.stem = reference.__module__.rpartition(".")[2]
        self.calls: Counter[str] = Counter()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation that is forced, demanded or preferred."""
        which = _forced.get()
        if which is None or not has(self.name, which):
            which = implementation_of(self.name, _device(args).type)
        self.calls[which] += 1
        return self.implementation(which)(*args, **kwargs)

    def implementation(self, which: str) -> Callable[P, R]:
        """Return one of `IMPLEMENTATIONS`; ImportError if what it needs is missing."""
        if which == "reference":
            return self.reference
        module = f"triton.{self.stem}" if which == "triton" else which
        package = __name__.rpartition(".")[0]
        return getattr(import_module(f"{package}.{module}"), self.name)


@contextmanager
def forced(which: str) -> Iterator[None]:
    """Run one implementation of every operation that has it, on any device.

    For tests and benchmarks; Triton runs on a CPU under its interpreter only.

    Args:
        which: one of `IMPLEMENTATIONS`.
    """
    if which not in IMPLEMENTATIONS:
        raise ValueError(f"which: expected one of {IMPLEMENTATIONS}, got {which!r}")
    token = _forced.set(which)
    try:
        yield
    finally:
        _forced.reset(token)


def _device(args: tuple[object, ...]) -> torch.device:
    """Return the device of the first argument that has one."""
    for arg in args:
        if isinstance(found := getattr(arg, "device", None), torch.device):
            return found
    raise TypeError("expected a tensor among the arguments of an operation")
