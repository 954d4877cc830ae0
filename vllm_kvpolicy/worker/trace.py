"""Records each event's survivors as true positions, for oracles and diagnostics.

Off unless a folder is named. One .npz file per event; waits for the device.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvpolicy.kernels.compact_pages import survivor_moves
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.trace.files import EventRecord, new_run, to_arrays
from vllm_kvpolicy.worker.batch import Batch, HeldPages, Placement
from vllm_kvpolicy.worker.notes import with_attention

logger = init_logger("vllm.kv_policy")

Rows = list[np.ndarray]  # one array of positions per head


class NoTrace:
    """Records nothing; the default, unless a trace folder is named."""

    def annotate(
        self, decision: Decision, needs: Needs, inputs: EventInputs
    ) -> Decision:
        """Return the decision as it is."""
        return decision

    def record(self, batch: Batch, decision: Decision, placement: Placement) -> None:
        """Write nothing."""


class Tracer(NoTrace):
    """Follows true positions of survivors and stores them; see `EventRecord`.

    Args:
        directory: of the trace; records go into a new folder in it.
        block_size: N, tokens per page.
        max_bytes: once the records hold this much, no more are written.
    """

    def __init__(self, directory: str, block_size: int, max_bytes: int = 2**30) -> None:
        self.directory = new_run(Path(directory))
        logger.info("recording events in %s", self.directory)
        self.block_size = block_size
        self.bytes_left = max_bytes
        self._positions: dict[int, Rows] = {}
        self._count = 0

    def annotate(
        self, decision: Decision, needs: Needs, inputs: EventInputs
    ) -> Decision:
        """Note the attention that the decision retains; needs the cache as it was."""
        return with_attention(decision, needs, inputs)

    def record(self, batch: Batch, decision: Decision, placement: Placement) -> None:
        """Write one record per event, before the tables are updated.

        Args:
            batch: the events and what their requests held.
            decision: the policy's choice.
            placement: where the survivors went.
        """
        held, lists, sources = batch.held, placement.lists, placement.sources
        moved = _host(self._moved(held, placement))
        pages, starts = _host(held.num_pages), _host(lists.first) * self.block_size
        keep, order = _host(decision.keep.flatten(1, 2)), _host(sources)
        notes = {name: _small(value) for name, value in decision.notes.items()}
        for row, (event, own) in enumerate(zip(batch.events, batch.rows, strict=True)):
            before = self._before(event, own, pages[row])
            chosen = [
                np.sort(tokens[mask[: len(tokens)]])
                for tokens, mask in zip(before, keep[row], strict=True)
            ]
            token = order[row] % held.max_tokens
            heads = zip(before, starts[row][:-1], starts[row][1:], strict=True)
            survivors = [tokens[token[start:end]] for tokens, start, end in heads]
            self._positions[own] = survivors
            shape = decision.keep.shape[1:3]
            self._write(
                EventRecord(
                    request_id=event.request_id,
                    policy=event.policy,
                    position=event.position,
                    ordinal=event.ordinal,
                    frontier=event.frontier_blocks * self.block_size,
                    budget=event.budget,
                    prompt=event.prompt_tokens,
                    sinks=event.sinks,
                    block_size=self.block_size,
                    held=_padded(before, shape),
                    selected=_padded(chosen, shape),
                    survivors=_padded(survivors, shape),
                    moved=moved[row],
                    notes={name: value[row] for name, value in notes.items()},
                )
            )

    def _moved(self, held: HeldPages, placement: Placement) -> torch.Tensor:
        """Return [E] float64, the share of survivors that change their slots."""
        lists, sources = placement.lists, placement.sources
        moves = survivor_moves(
            sources,
            held.pages,
            lists.first,
            lists.pages,
            None,
            held.max_tokens,
            self.block_size,
            groups=1,
        )
        return (moves.source != moves.dest)[0].double().mean(-1)

    def _before(self, event: CompactEvent, own: int, num_pages: np.ndarray) -> Rows:
        """Return the positions that each head holds, in physical order."""
        num_local = event.local_tokens(self.block_size)
        old: Rows = [np.empty(0, np.int32)] * len(num_pages)
        if event.ordinal:
            old = self._positions[own]
        rows = []
        for kept, pages in zip(old, num_pages, strict=True):
            count = int(pages) * self.block_size + num_local - len(kept)
            newer = np.arange(event.position - count, event.position)
            rows.append(np.concatenate([kept, newer]).astype(np.int32))
        return rows

    def _write(self, record: EventRecord) -> None:
        arrays: dict[str, Any] = to_arrays(record)
        size = sum(array.nbytes for array in arrays.values())
        if size <= self.bytes_left:
            np.savez(self.directory / f"{self._count:06d}.npz", **arrays)
        elif self.bytes_left >= 0:
            logger.warning(
                "the trace in %s is full after %d events; later events are not "
                "recorded",
                self.directory,
                self._count,
            )
        self.bytes_left -= size
        self._count += 1


def _host(values: torch.Tensor) -> np.ndarray:
    return values.cpu().numpy()  # sync-ok: tracing only


def _small(values: torch.Tensor) -> np.ndarray:
    """Return floats as float32 and all else as int32."""
    is_float = values.is_floating_point()
    return _host(values.to(torch.float32 if is_float else torch.int32))


def _padded(rows: Rows, shape: Sequence[int]) -> np.ndarray:
    """Return [L, H, longest] int32, rows padded with -1."""
    width = max(map(len, rows))
    padded = [np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows]
    return np.stack(padded).astype(np.int32).reshape(*shape, width)
