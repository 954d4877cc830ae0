"""The request table: which superblocks hold a request's survivors, and its frontier."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from vllm_kvpolicy.kernels.page_tables import enter_requests
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.transfer import Integers


class RequestRows:
    """Assigns rows of tables to requests; the last row belongs to none.

    Args:
        num_requests: requests that may be live at once.

    Attributes:
        null_row: the row of padding and of requests without one.
        row_of: rows by request.
    """

    def __init__(self, num_requests: int) -> None:
        self.null_row = num_requests
        self.row_of: dict[str, int] = {}
        self._free = list(range(num_requests))

    def __len__(self) -> int:
        """Return how many requests have a row."""
        return len(self.row_of)

    def take(self, request_id: str) -> int:
        """Return the request's row; assign a free one if it has none."""
        if request_id not in self.row_of:
            self.row_of[request_id] = self._free.pop()
        return self.row_of[request_id]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests that finished, were aborted or were preempted."""
        for request_id in request_ids:
            row = self.row_of.pop(request_id, None)
            if row is not None:
                self._free.append(row)

    def rows(self, request_ids: Sequence[str], num_rows: int) -> np.ndarray:
        """Return [num_rows] int64 rows of a batch's requests; the null row for padding.

        Example: "a" has row 2 and "b" none; the null row is 4. The rows of the batch
        ["b", "a"], padded to three, are [4, 2, 4].

        Args:
            request_ids: in the order of the batch; what follows is padding.
        """
        rows = np.full(num_rows, self.null_row, dtype=np.int64)
        get, null = self.row_of.get, self.null_row
        rows[: len(request_ids)] = [get(request_id, null) for request_id in request_ids]
        return rows

    def take_all(self, request_ids: Sequence[str], num_rows: int) -> np.ndarray:
        """Return `rows` of a batch after assigning rows to new requests."""
        for request_id in request_ids:
            self.take(request_id)
        return self.rows(request_ids, num_rows)


class RequestTable(RequestRows):
    """Gives each request a row from its first event on.

    A row holds superblocks of survivors, how many lie pinned before them, and how many
    entries vLLM's row has between those and the frontier, on the device. The last row
    belongs to no request and says "no event yet", so that requests without an event,
    padding and batches of graph capture need no branch.

    Args:
        max_global_blocks: most superblocks of survivors of one request.
    """

    def __init__(
        self,
        num_requests: int,
        max_global_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(num_requests)
        self.block_size = block_size
        self.device = device
        size = num_requests + 1
        self.global_blocks = torch.zeros(
            (size, max_global_blocks), dtype=torch.int32, device=device
        )
        self.num_global = torch.zeros(size, dtype=torch.int32, device=device)
        self.skip = torch.zeros(size, dtype=torch.int32, device=device)
        self.pinned = torch.zeros(size, dtype=torch.int32, device=device)
        self.dropped_tokens_cpu = np.zeros(size, dtype=np.int32)
        self.frontier_blocks_cpu = np.zeros(size, dtype=np.int32)
        self.skip_cpu = np.zeros(size, dtype=np.int32)
        self.positions_cpu = np.zeros(size, dtype=np.int64)  # of the last events

    @staticmethod
    def numbers(
        rows: Sequence[int], events: Sequence[CompactEvent]
    ) -> dict[str, Integers]:
        """Return what `update` needs on the device.

        Args:
            events: one each, with equally many destinations.

        Returns:
            By name, [E] and `dest` [E, D].
        """
        return {
            "rows": rows,
            "dest": [event.dest_blocks for event in events],
            "frontier": [event.frontier_blocks for event in events],
            "pins": [len(event.pinned_blocks) for event in events],
        }

    def update(
        self,
        rows: Sequence[int],
        events: Sequence[CompactEvent],
        sent: Mapping[str, torch.Tensor],
    ) -> None:
        enter_requests(
            sent["rows"],
            sent["dest"],
            sent["frontier"],
            sent["pins"],
            self.global_blocks,
            self.num_global,
            self.skip,
            self.pinned,
        )
        for row, event in zip(rows, events, strict=True):
            skip = event.frontier_blocks - len(event.pinned_blocks)
            dropped_blocks = skip - len(event.dest_blocks)
            self.dropped_tokens_cpu[row] = dropped_blocks * self.block_size
            self.skip_cpu[row] = skip
            self.frontier_blocks_cpu[row] = event.frontier_blocks
            self.positions_cpu[row] = event.position

    def fresh_tokens(self, rows: Sequence[int], events: Sequence[CompactEvent]) -> int:
        """Return the most tokens that a request computed since its last event."""
        size = self.block_size
        return max(
            event.position
            - int(self.positions_cpu[row] if event.ordinal else 0)
            - (0 if event.ordinal else len(event.pinned_blocks) * size)
            for row, event in zip(rows, events, strict=True)
        )
