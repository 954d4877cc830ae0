"""Operations: a PyTorch reference and faster twins of one name, signature and result.

`preferences` says which of them runs.
"""

from collections import Counter
from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar

import torch

from vllm_kvpolicy.kernels.preferences import implementation_of

P = ParamSpec("P")
R = TypeVar("R")


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
        """Run the implementation that is demanded or preferred."""
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


def _device(args: tuple[object, ...]) -> torch.device:
    """Return the device of the first argument that has one."""
    for arg in args:
        if isinstance(found := getattr(arg, "device", None), torch.device):
            return found
    raise TypeError("expected a tensor among the arguments of an operation")
