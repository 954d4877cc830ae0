"""Reads what servers measured while one task of one policy ran."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.accuracy.results import KEY_FIELDS, Line
from benchmarks.accuracy.servers import metrics_of

PLACE_FIELDS = KEY_FIELDS[:4]
"""What makes answers a batch: policy, budget, interval, task."""
COUNTERS = ("steps", "request_steps", "block_steps", "requests", "peak_blocks")
"""Of the engine: see docs/metrics.md."""
HITS = "vllm:prefix_cache_hits_total"
COMPARED = ("held_tokens", "peak_tokens", "tok_s")
"""Figures that are compared with those of full KV."""


def place_of(line: Line) -> tuple:
    """Return policy, budget, interval and task of an answer or a batch."""
    return tuple(line[field] for field in PLACE_FIELDS)


def measure(
    url: str, place: tuple, clients: int, ask: Callable[[], list[Line]]
) -> Line:
    """Run a batch and return what the server counted during it.

    Args:
        url: root of a server without other clients.

    Returns:
        The fields of PLACE_FIELDS; `answers`, `output_tokens`, of those; `seconds`,
        from the first request to the last answer; `clients`; `hit_tokens`, of prompts,
        that came from the prefix cache; and by how much COUNTERS grew, None where the
        server does not count.
    """
    before, began = metrics_of(url), time.perf_counter()
    lines = ask()
    seconds, after = time.perf_counter() - began, metrics_of(url)
    series = {name: f"kvpolicy_{name}_total" for name in COUNTERS}
    does_count = before.keys() >= set(series.values())
    grown = {
        name: after[key] - before[key] if does_count else None
        for name, key in series.items()
    }
    return {
        **dict(zip(PLACE_FIELDS, place, strict=True)),
        "answers": len(lines),
        "output_tokens": sum(line["output_tokens"] for line in lines),
        "seconds": round(seconds, 3),
        "clients": clients,
        "hit_tokens": after.get(HITS, 0.0) - before.get(HITS, 0.0),
        **grown,
    }


def figures(batches: Sequence[Line], block_size: int) -> dict[str, Any]:
    """Return the figures of a row.

    Args:
        batches: at least one, of one policy; of one task or of all.

    Returns:
        `answers`: those that batches have; `clients`: most requests at once; `tok_s`:
        output tokens per second of the server. Of batches in which the server counted
        as many requests as answers, so no other ones: `held_answers`; `running`: mean
        requests in a step; `held_blocks`, `held_tokens`: of one running request, mean
        over steps and requests; `peak_blocks`, `peak_tokens`: most held by a request,
        mean over requests. None where there is no such batch.
    """
    exact = [batch for batch in batches if batch["requests"] == batch["answers"]]
    total = {name: sum(batch[name] for batch in exact) for name in COUNTERS}
    held = _ratio(total["block_steps"], total["request_steps"])
    peak = _ratio(total["peak_blocks"], total["requests"])
    tokens = sum(batch["output_tokens"] for batch in batches)
    return {
        "answers": sum(batch["answers"] for batch in batches),
        "clients": max(batch["clients"] for batch in batches),
        "tok_s": _ratio(tokens, sum(batch["seconds"] for batch in batches)),
        "held_answers": sum(batch["answers"] for batch in exact),
        "running": _ratio(total["request_steps"], total["steps"]),
        "held_blocks": held,
        "held_tokens": None if held is None else held * block_size,
        "peak_blocks": peak,
        "peak_tokens": None if peak is None else peak * block_size,
    }


def ratios_to_full(
    ours: Mapping[str, Line], full: Mapping[str, Line], pooled: str
) -> dict[str, dict[str, Any]]:
    """Return each family's figures divided by those of full KV.

    Args:
        ours: family -> figures of a policy.

    Returns:
        Family -> figure of COMPARED -> `ratio`; `low`, `high`: smallest and largest
        ratio of a task, for `pooled` alone, None elsewhere. Families and figures that
        full KV lacks are left out, and of `pooled` those of other answers than its.
    """
    found: dict[str, dict[str, Any]] = {}
    for family, row in ours.items():
        for name in COMPARED:
            other = full.get(family, {})
            ratio = _ratio(row[name], other.get(name))
            # Of all tasks together only where both sides have the same ones.
            answers = "answers" if name == "tok_s" else "held_answers"
            is_alike = family != pooled or row[answers] == other.get(answers)
            if ratio is not None and is_alike:
                one = {"ratio": ratio, "low": None, "high": None}
                found.setdefault(family, {})[name] = one
    tasks = [ratios for family, ratios in found.items() if family != pooled]
    for name, one in found.get(pooled, {}).items():
        values = [ratios[name]["ratio"] for ratios in tasks if name in ratios]
        if values:
            one["low"], one["high"] = min(values), max(values)
    return found


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
