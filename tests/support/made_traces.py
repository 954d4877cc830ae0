"""Traces that nobody served: events with survivors as a test wants them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvpolicy.observe.trace_files import EventRecord, to_arrays

Choose = Callable[[np.ndarray], np.ndarray]
BUDGET = 64  # of the events of `run_request`


def make_event(**changes: Any) -> EventRecord:
    """Return an event of one head that holds positions 0 to 9, 6 to 9 local.

    It keeps 0, 3 and the local ones, and was to keep 0 and the local ones.
    """
    fields: dict[str, Any] = {"request_id": "r0", "policy": "snapkv", "position": 10}
    fields |= {"ordinal": 0, "frontier": 6, "budget": 5, "prompt": 8, "sinks": 1}
    fields |= {"pinned": 0, "block_size": 2, "held": rows(range(10))}
    fields |= {"selected": rows([0, 6, 7, 8, 9]), "survivors": rows([0, 3])}
    fields |= {"moved": 0.5}
    return EventRecord(**fields | changes)


def rows(*heads: Iterable[int]) -> np.ndarray:
    """Return [1, H, T] int32 rows of one layer, padded with -1."""
    lists = [list(head) for head in heads]
    width = max(map(len, lists))
    padded = [row + [-1] * (width - len(row)) for row in lists]
    return np.array([padded], np.int32)


def run_request(
    choose: Choose,
    *,
    policy: str = "snapkv",
    events: int = 4,
    shape: tuple[int, int] = (2, 2),
    sinks: int = 4,
) -> list[EventRecord]:
    """Return the events of a request that has one each time it holds two budgets.

    A budget's tokens come between events; heads keep no local tokens.

    Args:
        choose: takes the positions that a head holds, returns those that it keeps.
        shape: L and H.
        sinks: first tokens, left out of what may be dropped.
    """
    num_layers, num_heads = shape
    kept = np.empty((*shape, 0), np.int32)
    records = []
    for ordinal in range(events):
        position = BUDGET * (ordinal + 2)
        newer = np.arange(position - 2 * BUDGET + kept.shape[-1], position)
        newer = np.broadcast_to(newer, (*shape, len(newer)))
        held = np.concatenate([kept, newer], axis=-1).astype(np.int32)
        chosen = [np.sort(choose(row)) for row in held.reshape(-1, held.shape[-1])]
        kept = np.array(chosen, np.int32).reshape(num_layers, num_heads, -1)
        fields = {"request_id": f"{policy}-0", "policy": policy, "ordinal": ordinal}
        fields |= {"position": position, "frontier": position, "block_size": 16}
        fields |= {"budget": BUDGET, "prompt": 2 * BUDGET, "sinks": sinks}
        fields |= {"held": held, "selected": kept, "survivors": kept}
        records.append(make_event(**fields))
    return records


def write_trace(folder: Path, records: Iterable[EventRecord]) -> Path:
    """Write records as the worker does and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, record in enumerate(records):
        arrays: dict[str, Any] = to_arrays(record)
        np.savez(folder / f"{number:06d}.npz", **arrays)
    return folder
