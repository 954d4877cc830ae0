"""Owns what a trace of events says, as one result file small enough to commit.

Called by the command. What the numbers mean is defined in `vllm_kvpolicy.measures`.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvpolicy.diagnostics import summarise
from vllm_kvpolicy.measures import kept_mask, overlap
from vllm_kvpolicy.trace_files import EventRecord, read_trace

IOU_BY_LAYER = "iou_by_layer"


def read_policies(trace: Path) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy of a trace.

    Args:
        trace: folder that workers recorded.

    Returns:
        By policy what `diagnostics.summarise` gives, and `iou_by_layer`: a list of L
        means over heads and pairs of consecutive events; left out where no request had
        two events.

    Raises:
        ValueError: no events, or a file that is none.
    """
    summaries = summarise(trace)
    for policy, values in iou_by_layer(trace).items():
        summaries[policy][IOU_BY_LAYER] = values
    return summaries


def iou_by_layer(trace: Path) -> dict[str, list[float]]:
    """Return by policy and layer the IoU of what consecutive events keep."""
    latest: dict[str, EventRecord] = {}
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for event in read_trace(trace):
        previous = latest.get(event.request_id)
        if previous is not None and previous.ordinal + 1 == event.ordinal:
            iou, _ = overlap(kept_mask(previous), kept_mask(event))
            found[event.policy].append(iou.mean(-1))
        latest[event.request_id] = event
    return {policy: np.mean(pairs, axis=0).tolist() for policy, pairs in found.items()}
