"""Copies integers to the device and back without waiting for it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

Integers = np.ndarray | Sequence[int] | Sequence[Sequence[int]]
ALIGNMENT = 2  # numbers: kernels read 16 bytes at a time


def to_device(values: Integers, device: torch.device) -> torch.Tensor:
    """Copy rectangular integers as int64, through pinned memory.

    The stream orders the copy before its use.
    """
    host = torch.as_tensor(np.asarray(values, dtype=np.int64))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def to_device_together(
    values: Mapping[str, Integers], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copy several arrays as one, as `to_device` does: parts of one buffer."""
    arrays = {name: np.asarray(value, np.int64) for name, value in values.items()}
    sizes = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays.values()]
    buffer = np.zeros(sum(sizes), np.int64)
    first = np.cumsum([0, *sizes])
    for start, array in zip(first, arrays.values(), strict=False):
        buffer[start : start + array.size] = array.ravel()
    sent = to_device(buffer, device)
    return {
        name: sent[start : start + array.size].view(array.shape)
        for start, (name, array) in zip(first, arrays.items(), strict=False)
    }


class HostCopy:
    """Integers that are being copied to the host, which need not wait for them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = values
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_here(self) -> bool:
        """Return whether `read` returns without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> np.ndarray:
        """Wait for the copy, and for nothing after it; return the integers."""
        if self._event is not None:
            self._event.synchronize()  # sync-ok: see the docstring
        return self._host.numpy()
