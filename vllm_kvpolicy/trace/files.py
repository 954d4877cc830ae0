"""Reads and writes the files of a trace: one .npz per event, numbered in order.

Each start of a server makes a folder of its own in the trace's folder.
"""

import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

NOTE = "note_"  # prefix of the notes' names within a file


@dataclass(frozen=True)
class EventRecord:
    """One event. Positions are logical and count from 0; -1 pads the rows of heads.

    Args:
        request_id: vLLM's request id.
        policy: name of the request's policy.
        position: tokens computed before the event.
        ordinal: 0 for the request's first event, and again after a preemption.
        frontier: tokens at this position and later are local, all kept.
        budget: K, tokens per KV head.
        prompt: tokens of the prompt.
        sinks: first tokens that are always kept, protected prompt included.
        block_size: N, tokens per page.
        held: [L, H, T] int32, tokens held before the event, oldest first.
        selected: [L, H, K] int32, tokens chosen by the policy, before filling pages.
        survivors: [L, H, C] int32, tokens in the global pool, in physical order.
        moved: share of (head, token) pairs in the pool that changed place.
        notes: further arrays by name, [L, H, ...], float32 or int32:
            mass, segments, quotas: see `ams`; of `held`, [L, H, T], half-open
            ranges of it, [L, H, S, 2], and tokens, [L, H, S];
            retained_mass, lse_drop, density_60, density_90: see `worker.notes`.
    """

    request_id: str
    policy: str
    position: int
    ordinal: int
    frontier: int
    budget: int
    prompt: int
    sinks: int
    block_size: int
    held: np.ndarray
    selected: np.ndarray
    survivors: np.ndarray
    moved: float
    notes: Mapping[str, np.ndarray] = field(default_factory=dict)


def to_arrays(record: EventRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a record's file, by name."""
    values: dict[str, Any] = dict(vars(record))
    notes = values.pop("notes")
    values |= {NOTE + name: value for name, value in notes.items()}
    return {name: np.asarray(value) for name, value in values.items()}


def read_event(path: Path) -> EventRecord:
    """Read the event in one file.

    Raises:
        ValueError: it cannot be read, or does not hold the fields of a record.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"trace: cannot read {str(path)!r}: {error}") from None
    notes = {
        name.removeprefix(NOTE): arrays.pop(name)
        for name in list(arrays)
        if name.startswith(NOTE)
    }
    expected = {item.name for item in fields(EventRecord)} - {"notes"}
    if arrays.keys() != expected:
        raise ValueError(
            f"trace: {str(path)!r} is not an event file of this release, these "
            f"fields differ: {sorted(arrays.keys() ^ expected)}"
        )
    values: dict[str, Any] = {
        name: value if value.ndim else value.item() for name, value in arrays.items()
    }
    return EventRecord(**values, notes=notes)


def check_trace(folder: Path) -> None:
    """Check that a folder can be written to, and create it if it is missing.

    Raises:
        ValueError: it cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"trace: got {str(folder)!r} ({error.strerror}), expected a folder that "
            "can be written to"
        ) from None


def new_run(folder: Path) -> Path:
    """Create and return the folder of a run that starts now.

    Names begin with the time in UTC, so they sort by start, and are unique.
    """
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    run = folder / f"{started}-{uuid4().hex[:8]}"
    run.mkdir(parents=True)
    return run


def run_in(folder: Path) -> Path:
    """Return the folder that holds events: the given one or one below it.

    Args:
        folder: a run, or a trace in which one run has events.

    Raises:
        ValueError: no such folder, no events, or several runs with events.
    """
    if not folder.is_dir():
        raise ValueError(f"trace: no such folder {str(folder)!r}")
    runs = sorted({path.parent for path in folder.rglob("*.npz")})
    if not runs:
        raise ValueError(
            f"trace: no events in {str(folder)!r}; a request has its first event "
            "once it holds budget + interval tokens"
        )
    if len(runs) > 1:
        raise ValueError(
            f"trace: {str(folder)!r} holds {len(runs)} runs, name one of them: "
            f"{', '.join(map(str, runs))}"
        )
    return runs[0]


def read_trace(folder: Path) -> Iterator[EventRecord]:
    """Yield the events of a run in the order in which they happened.

    Args:
        folder: see `run_in`.

    Raises:
        ValueError: see `run_in`; or a file is not an event.
    """
    yield from map(read_event, sorted(run_in(folder).glob("*.npz")))
