"""Requests for planners under test."""

from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.events import EventPlan, Footprint


def request_plan(
    planner: Planner,
    plan: EventPlan,
    recent: int,
    sinks: int,
    keeps_all: bool = False,
) -> RequestPlan:
    """Return a request whose policy reads the planner's whole window."""
    footprint = Footprint(plan, recent, planner.limits.block_size, keeps_all)
    return RequestPlan("tova", footprint, sinks, planner.limits.window_tokens)
