"""Reads and writes the files of a trace: one .npz per event, numbered in order.

Each engine that starts makes a folder of its own in the trace's folder. Under tensor
parallelism each rank has a folder in that, with its own heads; they are read as one.
What is not as this release writes it is a ValueError that names the file or folder.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

NOTE = "note_"  # prefix of the notes' names within a file
RANK = "rank-{}-of-{}"  # folder of a rank, and of how many that record
OF_RANK = re.compile(r"rank-(\d+)-of-(\d+)")

MOST_MARKS = 2**30  # layers * heads * positions of one event
TOKENS = ("held", "selected", "survivors")


@dataclass(frozen=True)
class EventRecord:
    """One event. Positions are logical and count from 0; -1 pads the rows of heads.

    Args:
        position: tokens computed before the event.
        ordinal: 0 for the request's first event, and again after a preemption.
        frontier: tokens at this position and later are local, all kept.
        budget: K of this event, tokens per KV head that are kept behind the pinned
            ones.
        sinks: first tokens that are always kept, pinned ones included.
        pinned: first tokens that are no part of the event: all are kept, and they are
            not listed below.
        block_size: N, tokens per page.
        held: [L, H, T] int32, tokens held before the event, oldest first.
        selected: [L, H, K] int32, tokens chosen by the policy, before filling pages.
        survivors: [L, H, C] int32, tokens in the global pool, in physical order.
        moved: share of (head, token) pairs in the pool that changed place.
        notes: further arrays by name, [L, H, ...], float32 or int32:
            mass, segments, quotas: see `ams`; of `held`, [L, H, T], half-open
            ranges of it, [L, H, S, 2], and tokens, [L, H, S];
            retained_mass, lse_drop, density_60, density_90: see
            `worker.observers.trace.with_attention`.
        ranks: whose heads these are, each with H / ranks neighbours; files have one.
    """

    request_id: str
    policy: str
    position: int
    ordinal: int
    frontier: int
    budget: int
    prompt: int
    sinks: int
    pinned: int
    block_size: int
    held: np.ndarray
    selected: np.ndarray
    survivors: np.ndarray
    moved: float
    notes: Mapping[str, np.ndarray] = field(default_factory=dict)
    ranks: int = 1


def to_arrays(record: EventRecord) -> dict[str, np.ndarray]:
    values: dict[str, Any] = dict(vars(record))
    notes = values.pop("notes")
    del values["ranks"]
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
    # A damaged archive makes zipfile and numpy raise nearly anything.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"trace: cannot read {str(path)!r}: {reason}") from None
    notes = {
        name.removeprefix(NOTE): arrays.pop(name)
        for name in list(arrays)
        if name.startswith(NOTE)
    }
    expected = {item.name for item in fields(EventRecord)} - {"notes", "ranks"}
    if arrays.keys() != expected:
        raise ValueError(
            f"trace: {str(path)!r} is not an event file of this release, these "
            f"fields differ: {sorted(arrays.keys() ^ expected)}"
        )
    values: dict[str, Any] = {
        name: value if value.ndim else value.item() for name, value in arrays.items()
    }
    wrong = wrong_fields(values, notes)
    if wrong:
        raise ValueError(
            f"trace: {str(path)!r} is not an event file of this release, these "
            f"fields are of another kind: {wrong}"
        )
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


def run_name(engine: int = 0) -> str:
    """Return a name for the folder of a run that starts now.

    Names begin with the time in UTC, so they sort by start, and are unique; then comes
    the index of the engine among data-parallel ones.
    """
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    return f"{started}-engine{engine}-{uuid4().hex[:8]}"


def new_run(folder: Path, name: str | None = None) -> Path:
    """Create and return the folder of a run.

    Args:
        name: see `run_name`, followed by the folder of a rank if it is one of several;
            None for a new name.
    """
    run = folder / (name or run_name())
    run.mkdir(parents=True)
    return run


def run_in(folder: Path) -> Path:
    """Return the folder that holds events: a run, or the only one with events below.

    Raises:
        ValueError: no such folder, no events, or several runs with events.
    """
    if not folder.is_dir():
        raise ValueError(f"trace: no such folder {str(folder)!r}")
    holders = {path.parent for path in folder.rglob("*.npz")}
    # The folder itself may be that of one rank.
    runs = sorted({each if each == folder else whole_run(each) for each in holders})
    if not runs:
        raise ValueError(
            f"trace: no events in {str(folder)!r}; a request has its first event "
            "once it holds budget + interval tokens, with --kv-events pressure once "
            "the pool runs short"
        )
    if len(runs) > 1:
        raise ValueError(
            f"trace: {str(folder)!r} holds {len(runs)} runs, name one of them: "
            f"{', '.join(map(str, runs))}"
        )
    return runs[0]


def whole_run(folder: Path) -> Path:
    """Return the run of a rank's folder; a run itself."""
    return folder.parent if OF_RANK.fullmatch(folder.name) else folder


def read_trace(folder: Path) -> Iterator[EventRecord]:
    """Yield the events of a run, see `run_in`, in the order in which they happened.

    Where there are several ranks, those that all of them have recorded.

    Raises:
        ValueError: see `run_in`; a file is not an event, or not one of the same trace
            as those before; or a rank is missing.
    """
    run = run_in(folder)
    ranks = _ranks_of(run)
    recorded = [{path.name for path in rank.glob("*.npz")} for rank in ranks]
    names = sorted(set.intersection(*recorded))
    if not names:
        raise ValueError(f"trace: {str(run)!r} has no event that all ranks recorded")
    shapes: dict[str, tuple[int, ...]] = {}
    latest: dict[str, EventRecord] = {}
    for name in names:
        event = join_ranks([read_event(rank / name) for rank in ranks])
        before = latest.get(event.request_id, event)
        shape = event.held.shape[:2]
        is_next = before.ordinal + 1 == event.ordinal
        if (
            shapes.setdefault(event.policy, shape) != shape
            or before.policy != event.policy
            or (is_next and before.position > event.position)
        ):
            file = str(ranks[0] / name)
            raise ValueError(
                f"trace: the event in {file!r} does not go with those before it: its "
                "policy has other layers or heads, or its request another policy or "
                "a later position"
            )
        latest[event.request_id] = event
        yield event


def _ranks_of(run: Path) -> list[Path]:
    """Return the folders of a run's ranks in order; the run itself if it has none."""
    found = [OF_RANK.fullmatch(path.name) for path in run.iterdir()]
    ranks = {int(each[1]): int(each[2]) for each in found if each is not None}
    if not ranks:
        return [run]
    size = max(ranks.values())
    if len(ranks) != size or max(ranks) >= size:
        raise ValueError(
            f"trace: {str(run)!r} has the heads of ranks {sorted(ranks)}, expected all "
            f"of {size}; every host has those of its own ranks, copy them together"
        )
    return [run / RANK.format(rank, size) for rank in range(size)]


def join_ranks(records: Sequence[EventRecord]) -> EventRecord:
    """Return one event of all heads.

    Raises:
        ValueError: they are of different events.
    """
    first = records[0]
    names = ("request_id", "policy", "position", "ordinal", "frontier", "budget")
    if any(getattr(r, n) != getattr(first, n) for r in records for n in names):
        raise ValueError(
            "trace: ranks have recorded different events under one number: "
            + ", ".join(f"{r.request_id} at {r.position}" for r in records)
        )
    if len(records) == 1:
        return first
    if any(_kinds(record) != _kinds(first) for record in records):
        raise ValueError(
            f"trace: ranks have recorded {first.request_id} at {first.position} with "
            "different numbers of layers or heads, or different notes"
        )
    tokens: dict[str, Any] = {
        name: _side_by_side([getattr(each, name) for each in records], -1)
        for name in TOKENS
    }
    notes = {name: [r.notes[name] for r in records] for name in first.notes}
    heads = [record.held.shape[1] for record in records]
    return replace(
        first,
        **tokens,
        moved=float(np.average([record.moved for record in records], weights=heads)),
        notes={name: _side_by_side(parts, 0) for name, parts in notes.items()},
        ranks=len(records),
    )


def _kinds(record: EventRecord) -> tuple[Any, ...]:
    """Return what the records of all ranks have in common."""
    axes = {name: note.ndim for name, note in record.notes.items()}
    return record.held.shape[:2], axes


def _side_by_side(parts: Sequence[np.ndarray], fill: int) -> np.ndarray:
    """Return [L, H1 + H2 + .., ...] of [L, H, ...], the later axes padded alike."""
    shape = np.max([part.shape for part in parts], axis=0)[2:]
    padded = []
    for part in parts:
        missing = [(0, more) for more in shape - part.shape[2:]]
        widths = [(0, 0), (0, 0), *missing]
        padded.append(np.pad(part, widths, constant_values=fill))
    return np.concatenate(padded, axis=1)


def wrong_fields(values: Mapping[str, Any], notes: Mapping[str, Any]) -> list[str]:
    """Return the names of fields of an event that are not of the kind that we write.

    Bits that flip are found by the checksums of the archive, but not that a file is of
    somebody else. Policies name files of plots.

    Args:
        values: every field of `EventRecord` but `notes` and `ranks`, by name.
    """
    shape = np.shape(values["held"])[:2]

    def is_per_head(rows: Any, kinds: str) -> bool:
        return np.shape(rows)[:2] == shape and rows.dtype.kind in kinds

    def is_of(kind: Any, value: Any) -> bool:
        if kind is np.ndarray:
            return np.ndim(value) == 3 and is_per_head(value, "i")
        if kind is float:
            return isinstance(value, int | float)
        return type(value) is kind and (kind is int or value.isprintable())

    kinds = {item.name: item.type for item in fields(EventRecord)}
    right = {name: is_of(kinds[name], value) for name, value in values.items()}
    right["policy"] &= "/" not in str(values["policy"])
    for name in TOKENS:
        rows = values[name]
        if right[name] and right["position"] and rows.size:
            right[name] = rows.min() >= -1 and rows.max() < values["position"]
    right["held"] &= np.size(values["held"]) > 0
    heads = int(np.prod(shape))
    right["position"] &= right["position"] and values["position"] * heads <= MOST_MARKS
    right |= {NOTE + name: is_per_head(note, "fiub") for name, note in notes.items()}
    return [name for name, is_right in right.items() if not is_right]
