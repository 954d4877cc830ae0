"""Host integers to the device without waiting for it.

Called by the other modules of this folder.
Process: worker
"""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(
    values: np.ndarray | Sequence[int] | Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    """Copy integers through pinned memory; the stream orders copy and use.

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


def to_host(values: torch.Tensor) -> np.ndarray:
    """Read a few integers back; waits for the device where there is one.

    Args:
        values: integers, any shape.
    """
    return values.cpu().numpy()  # sync-ok: once per event, for heads of own lengths
