"""Requests for planners under test."""

from dataclasses import replace

from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.events import EventPlan, Footprint


def request_plan(
    planner: Planner,
    plan: EventPlan,
    recent: int,
    sinks: int,
    keeps_all: bool = False,
    window: int = 0,
    group_size: int = 2,
) -> RequestPlan:
    """Return a request whose policy reads its newest `window` queries."""
    size = planner.limits.block_size
    window_blocks = -(-window * group_size // (2 * size))
    plan = replace(plan, window_tokens=window)
    footprint = Footprint(plan, recent, size, keeps_all, window_blocks)
    return RequestPlan("tova", footprint, sinks)
