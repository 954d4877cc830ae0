"""Which row of a table belongs to which request.

Called by tables of this folder that follow a request from its first token.
Process: worker
"""

from collections.abc import Iterable, Sequence

import numpy as np


class RequestSlots:
    """Hands out slots; the last one belongs to nobody.

    Args:
        num_slots: requests that may be live at once.

    Attributes:
        null_slot: stands for padding, its contents mean nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self.null_slot = num_slots
        self._slot_of: dict[str, int] = {}
        self._free = list(range(num_slots))

    def take(self, request_ids: Sequence[str], num_rows: int) -> np.ndarray:
        """Return [num_rows] int64 slots of a batch, fresh ones for new requests.

        Args:
            request_ids: one per row; rows beyond are padding.
            num_rows: rows of the batch.
        """
        rows = np.full(num_rows, self.null_slot, dtype=np.int64)
        for row, request_id in enumerate(request_ids):
            if request_id not in self._slot_of:
                self._slot_of[request_id] = self._free.pop()
            rows[row] = self._slot_of[request_id]
        return rows

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished, were aborted or were preempted."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
