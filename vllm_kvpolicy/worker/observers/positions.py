"""Follows the true positions of survivors from event to event, on the host.

What records and shows events asks for it; it waits for the device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, Destinations

UNKNOWN = -1  # position of a survivor of an event that was not followed


@dataclass(frozen=True)
class Followed:
    """What the heads of one request hold before and after an event.

    Args:
        held: [n, T] int32 positions, in physical order; UNKNOWN also pads.
        num_held: [n] int64, how many of a head's are no padding.
        survivors: [n, C] int32, those in the global pool afterwards.
        num_survivors: [n] int64.
        first_known: tokens at this position and later were followed.
    """

    held: np.ndarray
    num_held: np.ndarray
    survivors: np.ndarray
    num_survivors: np.ndarray
    first_known: int


class TruePositions:
    """Remembers where the survivors of each request come from."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # By row: positions of survivors, and from where on they are known.
        self._known: dict[int, tuple[np.ndarray, int]] = {}

    def forget(self, rows: Iterable[int] | None = None) -> None:
        """Forget requests by row, or all: events will pass that are not followed."""
        for row in list(self._known) if rows is None else rows:
            self._known.pop(row, None)

    def follow(self, batch: Batch, destinations: Destinations) -> Iterator[Followed]:
        """Yield what each event of a batch does, before the tables are updated."""
        size, lists = self.block_size, destinations.lists
        pages, starts = host(batch.held.num_pages), host(lists.first) * size
        sources = host(destinations.sources)
        for row, (event, own) in enumerate(zip(batch.events, batch.rows, strict=True)):
            num_held = pages[row] * size + event.local_tokens(size)
            held, first_known = self._held(event, own, num_held)
            counts = np.diff(starts[row])
            place = np.arange(counts.max(initial=0))
            index = np.minimum(starts[row][:-1, None] + place, sources.shape[1] - 1)
            token = sources[row][index] % batch.held.max_tokens
            is_there = place < counts[:, None]
            token = np.where(is_there, token, 0)
            survivors = np.take_along_axis(held, token, 1)
            survivors = np.where(is_there, survivors, UNKNOWN).astype(np.int32)
            self._known[own] = survivors, first_known
            yield Followed(held, num_held, survivors, counts, first_known)

    def _held(
        self, event: CompactEvent, own: int, num_held: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Return [n, T] positions before the event, and from where on they are known.

        Tokens since the last event are consecutive up to this one.
        """
        frontier = event.frontier_blocks - len(event.leaving_blocks)
        frontier *= self.block_size  # of the last event, or where what is pinned ends
        num_old = num_held - (event.position - frontier)
        old, first_known = np.empty((len(num_held), 0), np.int32), 0
        if event.ordinal and own in self._known:
            old, first_known = self._known[own]
        elif event.ordinal:
            old = np.full((len(num_held), num_old.max()), UNKNOWN, np.int32)
            first_known = frontier
        place = np.arange(num_held.max())
        newer = event.position - num_held[:, None] + place
        held = np.where(place < num_held[:, None], newer, UNKNOWN).astype(np.int32)
        is_old = place[: old.shape[1]] < num_old[:, None]
        held[:, : old.shape[1]][is_old] = old[is_old]
        return held, first_known


def host(values: torch.Tensor) -> np.ndarray:
    """Return an array of the host; waits for the device."""
    return values.cpu().numpy()  # sync-ok: only while events are recorded or shown
