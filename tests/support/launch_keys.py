"""Records which variants of Triton's kernels a GPU would need, without running one.

Triton compiles a kernel for each combination of constants, dtypes, and what it finds
out about the other arguments: whether a number is one, is divisible by 16 or needs 64
bits, and whether an address is divisible by 16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import JITFunction, driver

from support.compile_triton_kernels import NO_DEVICE

Variant = tuple[str, str]


@dataclass(frozen=True)
class Address:
    """Stands for a tensor without data: its memory begins at an even address."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        """Return the bytes before its first number."""
        return self.offset

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return an address in place of a tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(value.dtype, value.storage_offset() * value.element_size())


@contextmanager
def recorded() -> Iterator[set[Variant]]:
    """Launch nothing, and yield (kernel, its variant) of what would have run."""
    found: set[Variant] = set()

    def record(
        kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        _, _, _, _, bind = kernel.device_caches[0]
        named = {key: Address.of(value) for key, value in options.items()}
        _, special, rest = bind(*map(Address.of, args), **named)
        found.add((kernel.__name__, f"{special} {sorted(rest.items())}"))

    run, active = JITFunction.run, driver._active
    driver.set_active(NO_DEVICE)
    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run
        driver.set_active(active)
