"""Copies integers to the device and back without waiting for it."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(
    values: np.ndarray | Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    """Copy integers through pinned memory; the stream orders the copy before its use.

    Args:
        values: rectangular integers on the host.
        device: where they are needed.

    Returns:
        int64 tensor of the same shape.
    """
    host = torch.as_tensor(np.asarray(values, dtype=np.int64))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Integers that are being copied to the host, which need not wait for them.

    Args:
        values: a few integers, any shape.
    """

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
