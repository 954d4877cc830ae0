"""Requests for planners under test."""

from vllm_kvpolicy.block_manager.planner import Asked, Planner
from vllm_kvpolicy.events import EventPlan, Footprint


def asked(
    planner: Planner,
    plan: EventPlan,
    recent: int,
    sinks: int,
    keeps_all: bool = False,
) -> Asked:
    """Return a request whose policy reads the planner's whole window."""
    footprint = Footprint(plan, recent, planner.limits.block_size, keeps_all)
    return Asked("tova", footprint, sinks, planner.limits.window_tokens)
