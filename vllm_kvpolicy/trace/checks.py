"""Finds what is wrong with an event that a file claims to hold, before it is measured.

Bits that flip are found by the checksums of the archive. This is for files that are
whole and yet none of ours: of another version, or written by something else.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

MOST = 2**31 - 1
MOST_MARKS = 2**30  # layers * heads * positions of one event
# Integers of a record and the least that each may be.
LEAST = {
    "position": 1,
    "ordinal": 0,
    "frontier": 0,
    "budget": 0,
    "prompt": 0,
    "sinks": 0,
    "block_size": 1,
}
TEXTS = ("request_id", "policy")
TOKENS = ("held", "selected", "survivors")
# Axes of notes behind [L, H]; those of others are not measured.
NOTE_AXES = {
    "retained_mass": 0,
    "lse_drop": 0,
    "density_60": 0,
    "density_90": 0,
    "mass": 1,
    "segments": 2,
}


def problems(values: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of an event, in words.

    Args:
        values: every field of `EventRecord` but `notes` and `ranks`, by name.
        notes: its notes.
    """
    for name in TEXTS:
        if not isinstance(values[name], str) or not values[name].isprintable():
            yield f"{name} is no text"
    if "/" in str(values["policy"]):
        yield "policy is no name"
    for name, least in LEAST.items():
        value = values[name]
        if type(value) is not int or not least <= value <= MOST:
            yield f"{name} is not an integer from {least} to {MOST}"
    if not isinstance(values["moved"], int | float):
        yield "moved is no number"
    tokens = {name: values[name] for name in TOKENS}
    for name, rows in tokens.items():
        if np.ndim(rows) != 3 or rows.dtype.kind != "i":
            yield f"{name} is not [layers, heads, tokens] of integers"
            return
    held = values["held"]
    if not held.size or any(r.shape[:2] != held.shape[:2] for r in tokens.values()):
        yield f"{', '.join(TOKENS)} are not of the same layers and heads"
        return
    if all(type(values[name]) is int for name in LEAST):
        yield from _misplaced(values)
    yield from _note_problems(notes, held)


def _misplaced(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield which positions cannot be."""
    position, frontier = values["position"], values["frontier"]
    if position * values["held"][..., 0].size > MOST_MARKS:
        yield f"position {position} is too large to measure"
    for name in TOKENS:
        rows = values[name]
        if rows.size and (rows.min() < -1 or rows.max() >= position):
            yield f"{name} has tokens outside 0 to {position} - 1"
    if frontier > position:
        yield f"frontier {frontier} is behind position {position}"


def _note_problems(notes: Mapping[str, Any], held: np.ndarray) -> Iterator[str]:
    """Yield which notes cannot be measured."""
    for name, note in notes.items():
        axes = NOTE_AXES.get(name)
        if np.shape(note)[:2] != held.shape[:2] or note.dtype.kind not in "fiub":
            yield f"the note {name} is not of numbers per layer and head"
        elif axes is not None and note.ndim != 2 + axes:
            yield f"the note {name} has {note.ndim} axes instead of {2 + axes}"
    if {"mass", "segments"} <= set(notes) and not _fits(
        notes["mass"], notes["segments"], held
    ):
        yield "the notes mass and segments are not of the tokens held"


def _fits(mass: np.ndarray, segments: np.ndarray, held: np.ndarray) -> bool:
    """Return whether every token held has a mass, and segments are of tokens held.

    Both may be padded, to the widest of the events of one step.
    """
    if segments.ndim != 4 or segments.shape[-1] != 2 or segments.dtype.kind != "i":
        return False
    counts = (held >= 0).sum(-1)
    if mass.ndim != 3 or mass.shape[-1] < counts.max():
        return False
    is_held = np.arange(mass.shape[-1]) < counts[..., None]
    lengths = counts[..., None, None]
    used = segments[..., 1] > segments[..., 0]
    inside = (segments >= 0) & (segments <= lengths)
    whole = np.all(np.isfinite(mass[is_held])) and np.all(inside[used])
    return bool(whole and np.all(used.any(-1)))
