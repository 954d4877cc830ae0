"""Which implementation an operation runs: the reference, or a faster twin of it.

An operation is a PyTorch reference and, under the same name in kernels.triton and in
kernels.cuda, twins with its signature and its results.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
IMPLEMENTATIONS = ("reference", "triton", "cuda")
_forced: ContextVar[str | None] = ContextVar("implementation", default=None)


class Operation(Generic[P, R]):
    """Calls the implementation for the device of its first tensor.

    A CPU runs the reference, a GPU the twin in Triton unless `forced` says otherwise.

    Args:
        reference: a function called NAME_ref, in module kernels.STEM. Its twins are
            NAME in kernels.triton.STEM and, if `in_cuda`, in kernels.cuda.STEM.
        in_cuda: there is a twin in CUDA C++.

    Attributes:
        name: NAME.
        reference: the reference.
        calls: how often each implementation has run in this process.
    """

    def __init__(self, reference: Callable[P, R], in_cuda: bool = False) -> None:
        update_wrapper(self, reference)
        self.reference = reference
        self.name = self.__name__ = reference.__name__.removesuffix("_ref")
        self.stem = reference.__module__.rpartition(".")[2]
        self.in_cuda = in_cuda
        self.calls: Counter[str] = Counter()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation of the moment."""
        which = _forced.get()
        if which is None or (which == "cuda" and not self.in_cuda):
            which = "triton" if _device(args).type == "cuda" else "reference"
        self.calls[which] += 1
        return self.implementation(which)(*args, **kwargs)

    def implementation(self, which: str) -> Callable[P, R]:
        """Return one implementation.

        Args:
            which: one of `IMPLEMENTATIONS`.

        Raises:
            ImportError: what it needs is not installed.
        """
        if which == "reference":
            return self.reference
        package = __name__.rpartition(".")[0]
        return getattr(import_module(f"{package}.{which}.{self.stem}"), self.name)


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
