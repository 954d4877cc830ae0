"""Answers, summaries and events that nobody measured, for tests of the report."""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import summary
from support.made_traces import make_event, write_trace
from vllm_kvpolicy.observe.trace_files import EventRecord, new_run

SETTINGS = {"block_size": 32, "own_server": True, "group_size": 4}
SETTINGS |= {"evict_prompts": True, "keep_prompts": False, "policy_config": {}}
SETTINGS |= {"variants": {}}
PLACES = {
    "full": [(None, None)],
    "tova": [(96, 64), (128, 64)],
    "ams-tova": [(96, 64), (128, 64)],
}


def lines(samples: int = 1) -> list[dict]:
    """Return the answers of three policies on two tasks, four questions each."""
    found = []
    for policy, places in PLACES.items():
        for (budget, interval), task in [
            (p, t) for p in places for t in ("a:1", "b:2")
        ]:
            for number in range(4 * samples):
                question, sample = divmod(number, samples)
                right = policy == "full" or question < (2 if policy == "tova" else 3)
                made = {"policy": policy, "budget": budget, "interval": interval}
                made |= {"task": task, "id": str(question), "sample": sample}
                made |= {"digest": "00000000", "correct": right, "score": float(right)}
                made |= {"answer": "5" if right else "6", "prompt_tokens": 50}
                made |= {"output_tokens": 100 + (budget or 0), "capped": False}
                found.append(made | {"repeated": {"4": 0.2, "8": 0.1, "20": 0.0}})
    return found


def record(samples: int = 1) -> dict:
    """Return the record of `lines`, which the caller may change."""
    return deepcopy(_record(samples))


@cache
def _record(samples: int) -> dict:
    return {"settings": SETTINGS, **summary.summarise(lines(samples), SETTINGS)}


def event(position: int, ordinal: int, heads: list, **changes: Any) -> EventRecord:
    """Return an event that keeps the given positions, by layer and head."""
    kept = np.array(heads, np.int32)
    held = np.broadcast_to(
        np.arange(position, dtype=np.int32), (*kept.shape[:2], position)
    )
    fields: dict[str, Any] = {"request_id": "r", "policy": "tova", "position": position}
    fields |= {"ordinal": ordinal, "frontier": position, "budget": kept.shape[-1]}
    fields |= {"prompt": 1, "sinks": 0, "block_size": 1, "moved": 0.0}
    fields |= {"held": held, "selected": kept, "survivors": kept}
    return make_event(**fields | changes)


def write_run(folder: Path, records: Iterable[EventRecord]) -> Path:
    return write_trace(new_run(folder), records)
