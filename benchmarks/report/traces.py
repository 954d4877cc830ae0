"""Summarises a trace as one result file that is small enough to commit."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvpolicy.commands.trace import summarise
from vllm_kvpolicy.observe.measures import kept_mask, overlap
from vllm_kvpolicy.observe.trace_files import EventRecord, read_trace

BUDGETS = "budgets"
IOU_BY_LAYER = "iou_by_layer"
SEGMENTS = "segments_of_heads"
SHOWN_HEADS = 2
Pair = tuple[EventRecord, EventRecord]


def read_policies(trace: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy of a trace.

    Args:
        trace: folder that workers recorded, of one run.

    Returns:
        By policy, the figures of `report.summarise`; `budgets`: those of its requests;
        where a request had two events, `iou_by_layer`: a list of L means over heads and
        pairs of consecutive events; and of AMS `segments_of_heads`, see
        `segments_of_heads`.

    Raises:
        ValueError: no events, several runs, or a file that is not an event.
    """
    summaries = summarise(trace)
    budgets: dict[str, set[int]] = defaultdict(set)
    overlaps: dict[str, list[np.ndarray]] = defaultdict(list)
    latest: dict[str, EventRecord] = {}
    longest: dict[str, Pair] = {}
    for event in read_trace(trace):
        policy = event.policy
        budgets[policy].add(event.budget)
        previous = latest.get(event.request_id)
        latest[event.request_id] = event
        if previous is None or previous.ordinal + 1 != event.ordinal:
            continue
        iou, _ = overlap(kept_mask(previous), kept_mask(event))
        overlaps[policy].append(iou.mean(-1))
        if policy not in longest or event.ordinal > longest[policy][1].ordinal:
            longest[policy] = previous, event
    for policy, values in summaries.items():
        values[BUDGETS] = sorted(budgets[policy])
        if policy in longest:
            values[IOU_BY_LAYER] = np.mean(overlaps[policy], axis=0).tolist()
        if policy in longest and "segments" in longest[policy][1].notes:
            values[SEGMENTS] = list(segments_of_heads(longest[policy]))
    return summaries


def segments_of_heads(pair: Pair) -> Iterator[dict[str, Any]]:
    """Yield the AMS segments of the first heads of the middle layer at two events.

    Args:
        pair: consecutive events of one request, with notes of `allocators.ams`.

    Yields:
        By event, then by head: `layer`, `head`, `ordinal`, `position`; `old`: tokens
        that survived the pair's first event, 0 at that; and per segment, oldest first,
        `tokens` held, share of the `mass`, `quota`, and tokens `chosen`, sinks and
        newest tokens included.
    """
    layers, heads = pair[0].held.shape[:2]
    layer = layers // 2
    for event, since in zip(pair, (0, pair[0].position), strict=True):
        for head in range(min(heads, SHOWN_HEADS)):
            held = event.held[layer, head]
            held = held[held >= 0]
            bounds = event.notes["segments"][layer, head]
            is_used = bounds[:, 1] > bounds[:, 0]
            starts, ends = bounds[is_used].T
            mass = event.notes["mass"][layer, head, : len(held)].astype(float)
            chosen = np.isin(held, event.selected[layer, head])
            yield {
                "layer": layer,
                "head": head,
                "ordinal": event.ordinal,
                "position": event.position,
                "old": int(np.count_nonzero(held < since)),
                "tokens": (ends - starts).tolist(),
                "mass": _short(np.add.reduceat(mass, starts)),
                "quota": event.notes["quotas"][layer, head, is_used].tolist(),
                "chosen": np.add.reduceat(chosen, starts, dtype=int).tolist(),
            }


def _short(values: np.ndarray) -> list[float]:
    """Return values rounded to four digits, so that files stay small."""
    return [float(f"{value:.4g}") for value in values]
