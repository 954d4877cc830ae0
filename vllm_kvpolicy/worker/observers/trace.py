"""Records each event's survivors as true positions, for oracles and diagnostics.

Off unless a folder is named. One .npz file per event; waits for the device.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_kvpolicy.kernels.compact_pages import survivor_moves
from vllm_kvpolicy.kernels.nucleus import (
    WEIGHT_UNIT,
    nucleus_counts,
    retained_mass,
    window_mean,
)
from vllm_kvpolicy.observe.trace_files import EventRecord, new_run, to_arrays
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs
from vllm_kvpolicy.worker.batch import Batch, Destinations, HeldPages
from vllm_kvpolicy.worker.observers.positions import TruePositions, host

DENSITY_PERCENTS = (60, 90)


def with_attention(decision: Decision, needs: Needs, inputs: EventInputs) -> Decision:
    """Note the attention that a decision retains and how dense attention is.

    Of what lies behind the pinned tokens, as policies see it.

    Notes, [E, L, H] float32, means over the queries of the policy's window:
        retained_mass: share of the attention that the chosen tokens hold;
        lse_drop: minus its logarithm, in nats: the LSE of all held tokens minus that
            of the chosen ones; at most 32 ln 2, the resolution of the weights;
        density_60, density_90: share of the held tokens that holds 60 and 90 % of the
            attention.

    Returns:
        The decision, with these notes where the policy reads queries and keys and the
        model has no learned sinks, whose share they do not count.
    """
    if inputs.sink_logits is not None or not (needs.window_tokens and needs.keys):
        return decision
    queries = inputs.given("queries")[..., -needs.window_tokens :, :]
    lengths = inputs.lengths
    window = (queries, inputs.given("keys"), lengths, inputs.scale)
    retained = retained_mass(*window, decision.keep)
    notes = {
        "retained_mass": 1 - window_mean(1 - retained, lengths),
        "lse_drop": window_mean(-retained.clamp(1 / WEIGHT_UNIT).log(), lengths),
    }
    for percent in DENSITY_PERCENTS:
        counts = nucleus_counts(*window, percent / 100)
        notes[f"density_{percent}"] = window_mean(counts, lengths) / lengths
    return replace(decision, notes={**decision.notes, **notes})


logger = init_logger("vllm.kv_policy")


class Tracer:
    """Stores the true positions of survivors; see `EventRecord`.

    Args:
        directory: of the trace; records go into a new folder in it, see `new_run`.
        on_off: hears of it where no more can be written.
        max_bytes: once the records hold this much, no more are written.
    """

    def __init__(
        self,
        directory: str,
        block_size: int,
        on_off: Callable[[], None],
        max_bytes: int = 2**30,
        name: str | None = None,
    ) -> None:
        self.directory = new_run(Path(directory), name)
        logger.info("recording events in %s", self.directory)
        self.block_size, self.on_off = block_size, on_off
        self.bytes_left = max_bytes
        self.positions = TruePositions(block_size)
        self._count = 0

    def record(
        self, batch: Batch, decision: Decision, destinations: Destinations
    ) -> None:
        """Write one record per event, before the tables are updated."""
        moved = host(self._moved(batch.held, destinations))
        keep = host(decision.keep.flatten(1, 2))
        notes = {name: _small(value) for name, value in decision.notes.items()}
        followed = self.positions.follow(batch, destinations)
        for row, (event, seen) in enumerate(zip(batch.events, followed, strict=True)):
            heads = zip(seen.held, seen.num_held, keep[row], strict=True)
            chosen = [
                np.sort(tokens[:count][mask[:count]]) for tokens, count, mask in heads
            ]
            shape = decision.keep.shape[1:3]
            pinned = len(event.pinned_blocks) * self.block_size
            self._write(
                EventRecord(
                    request_id=event.request_id,
                    policy=event.policy,
                    position=event.position,
                    ordinal=event.ordinal,
                    frontier=event.frontier_blocks * self.block_size,
                    budget=event.budget,
                    prompt=event.prompt_tokens,
                    sinks=pinned + event.sinks,
                    pinned=pinned,
                    block_size=self.block_size,
                    held=seen.held.reshape(*shape, -1),
                    selected=_padded(chosen, shape),
                    survivors=seen.survivors.reshape(*shape, -1),
                    moved=moved[row],
                    notes={name: value[row] for name, value in notes.items()},
                )
            )

    def _moved(self, held: HeldPages, destinations: Destinations) -> torch.Tensor:
        """Return [E] float64, the share of survivors that change their slots."""
        lists, sources = destinations.lists, destinations.sources
        moves = survivor_moves(
            sources,
            held.pages,
            lists.first,
            lists.pages,
            None,
            held.max_tokens,
            self.block_size,
        )
        return (moves.source != moves.dest).double().mean(-1)

    def _write(self, record: EventRecord) -> None:
        arrays: dict[str, Any] = to_arrays(record)
        size = sum(array.nbytes for array in arrays.values())
        if size <= self.bytes_left:
            self._save(arrays)
        elif self.bytes_left >= 0:
            self._end(f"the trace in {self.directory} is full")
        self.bytes_left -= size
        self._count += 1

    def _save(self, arrays: dict[str, Any]) -> None:
        """Write a file; where that fails, warn and record no more, but serve on.

        What a full disk has cut short goes: readers would refuse the whole trace.
        """
        path = self.directory / f"{self._count:06d}.npz"
        try:
            np.savez(path, **arrays)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            self.bytes_left = -1
            where = f"the trace in {self.directory} ({error.strerror})"
            self._end(f"cannot write to {where}")

    def _end(self, why: str) -> None:
        text = "%s after %d events; later events are not recorded"
        logger.warning(text, why, self._count)
        self.on_off()


def _small(values: torch.Tensor) -> np.ndarray:
    """Return floats as float32 and all else as int32."""
    is_float = values.is_floating_point()
    return host(values.to(torch.float32 if is_float else torch.int32))


def _padded(rows: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray:
    """Return [L, H, longest] int32, rows padded with -1."""
    width = max(map(len, rows))
    padded = [np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows]
    return np.stack(padded).astype(np.int32).reshape(*shape, width)
