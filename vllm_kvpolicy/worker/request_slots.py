"""Assigns rows of tables, called slots, to requests."""

from collections.abc import Iterable, Sequence

import numpy as np


class Slots:
    """Assigns slots to requests; the last slot belongs to none.

    Args:
        num_slots: requests that may be live at once.

    Attributes:
        null_slot: the slot of padding and of requests without one.
        slot_of: slots by request.
    """

    def __init__(self, num_slots: int) -> None:
        self.null_slot = num_slots
        self.slot_of: dict[str, int] = {}
        self._free = list(range(num_slots))

    def __len__(self) -> int:
        """Return how many requests have a slot."""
        return len(self.slot_of)

    def take_one(self, request_id: str) -> int:
        """Return the request's slot; assign a free one if it has none."""
        if request_id not in self.slot_of:
            self.slot_of[request_id] = self._free.pop()
        return self.slot_of[request_id]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished, were aborted or were preempted."""
        for request_id in request_ids:
            slot = self.slot_of.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)

    def rows(self, request_ids: Sequence[str], num_rows: int) -> np.ndarray:
        """Return [num_rows] int64 slots of a batch; null slots where it is padded.

        Args:
            request_ids: one per row; rows beyond are padding.
            num_rows: rows of the batch.
        """
        rows = np.full(num_rows, self.null_slot, dtype=np.int64)
        get, null = self.slot_of.get, self.null_slot
        rows[: len(request_ids)] = [get(request_id, null) for request_id in request_ids]
        return rows


class RequestSlots(Slots):
    """Slots that requests have from their first token on."""

    def take(self, request_ids: Sequence[str], num_rows: int) -> np.ndarray:
        """Return `rows` of a batch after assigning slots to new requests."""
        for request_id in request_ids:
            self.take_one(request_id)
        return self.rows(request_ids, num_rows)
