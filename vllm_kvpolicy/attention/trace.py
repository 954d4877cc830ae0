"""Records each event's survivors as true positions, for oracles and diagnostics.

Off unless `trace_dir` is set. One .npz file per event; waits for the device.
Called by attention.compaction.
Process: worker
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_kvpolicy.attention.slots import SlotTable
from vllm_kvpolicy.protocol import CompactEvent


class Tracer:
    """Follows true positions of survivors and writes them down.

    A record holds, all positions being logical and counted from 0:
        position, ordinal, frontier, budget: integers of the event;
        selected: [L, H, K] int32, what the policy chose, before pages are filled up
            (padded with -1 where a policy keeps more or fewer);
        survivors: [L, H, C] int32, what the global pool holds, in physical order;
        moved: fraction of (head, token) pairs in the pool that changed their place.

    Args:
        directory: where the records go; made if missing.
        slots: the slot table before the event.
    """

    def __init__(self, directory: str, slots: SlotTable) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.slots = slots
        self._positions: dict[int, np.ndarray] = {}
        self._count = 0

    def record(
        self,
        events: Sequence[CompactEvent],
        slots: Sequence[int],
        keep: torch.Tensor,
        placed: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Write one record per event; call before the slot table is updated.

        Args:
            events: a batch of events.
            slots: their slots.
            keep: [E, L, H, T] bool, the policy's choice.
            placed: [E, L, H, C] int64, token index that each destination receives.
            lengths: [E] int64, tokens held before the event.
        """
        held_counts = lengths.tolist()  # sync-ok: tracing only
        for row, (event, slot) in enumerate(zip(events, slots, strict=True)):
            before = self._before(event, slot, held_counts[row], placed.shape[1:3])
            index = placed[row].cpu().numpy()  # sync-ok: tracing only
            chosen = keep[row].cpu().numpy()[..., : held_counts[row]]  # sync-ok: trace
            survivors = np.take_along_axis(before, index, axis=-1)
            self._positions[slot] = survivors
            np.savez(
                self.directory / f"{self._count:06d}.npz",
                request_id=event.request_id,
                position=event.position,
                ordinal=event.ordinal,
                budget=event.budget,
                frontier=event.frontier_blocks * self.slots.block_size,
                selected=_true_positions(chosen, before),
                survivors=survivors,
                moved=self._moved(event, index),
            )
            self._count += 1

    def _before(
        self, event: CompactEvent, slot: int, num_held: int, heads: Sequence[int]
    ) -> np.ndarray:
        """Return [L, H, T] true positions of the held tokens, in physical order."""
        old = self._positions[slot] if event.ordinal else np.zeros((*heads, 0), int)
        num_old = old.shape[-1]
        newer = np.arange(event.position - (num_held - num_old), event.position)
        newer = np.broadcast_to(newer, (*heads, len(newer)))
        return np.concatenate([old, newer], axis=-1).astype(np.int32)

    def _moved(self, event: CompactEvent, index: np.ndarray) -> float:
        """Return the share of destination slots whose token came from elsewhere."""
        block_size = self.slots.block_size
        source = np.asarray(event.source_blocks)[index // block_size]
        here = np.repeat(np.asarray(event.dest_blocks), block_size)
        offset = np.arange(len(here)) % block_size
        return float(np.mean((source != here) | (index % block_size != offset)))


def _true_positions(chosen: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return [L, H, K] sorted positions of a [L, H, T] mask, padded with -1."""
    width = int(chosen.sum(-1).max())
    last = np.iinfo(np.int32).max
    positions = np.sort(np.where(chosen, before, last), axis=-1)[..., :width]
    return np.where(positions == last, -1, positions)
