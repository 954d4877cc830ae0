"""What a scheduler holds on to for requests that have gone."""

from collections import Counter
from typing import Any

from vllm.v1.request import RequestStatus


def find(scheduler: Any) -> list[str]:
    """Return what is held by no request; abort those that there are first.

    Args:
        scheduler: of ours, at the end of a test.
    """
    found = _strangers(scheduler)
    if scheduler.connector is not None:  # refused; tests leave it half made
        return found
    found += _miscounted(scheduler)
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    if scheduler.requests or scheduler.deferred_frees:  # until steps end, never here
        return found
    pool = scheduler.kv_policy_manager.block_pool
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        found.append(f"{pool.get_num_free_blocks()} free of {pool.num_gpu_blocks - 1}")
    if scheduler.kv_policy_planner.num_global_blocks:
        found.append("planner.num_global_blocks")
    return found + _left_over(scheduler)


def _strangers(scheduler: Any) -> list[str]:
    """Return requests that our objects know and the scheduler does not."""
    held = scheduler.kv_policy_manager.req_to_blocks
    known = {
        "planner": scheduler.kv_policy_planner.states.keys(),
        "bookings": scheduler.kv_policy_entry.forecast.bookings.keys(),
        "superblocks": {name for name, blocks in held.items() if blocks},
    }
    return [
        f"{what} of {sorted(ids - scheduler.requests.keys())}"
        for what, ids in known.items()
        if ids - scheduler.requests.keys()
    ]


def _miscounted(scheduler: Any) -> list[str]:
    """Return superblocks whose count of holders is not how many hold them."""
    if scheduler.deferred_frees:
        return []
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    rows = [row for manager in managers for row in manager.req_to_blocks.values()]
    rows += scheduler.kv_policy_manager._windows.values()
    holders = Counter(block.block_id for row in rows for block in row)
    return [
        f"{block} is held by {holders[block.block_id]}"
        for block in scheduler.kv_policy_manager.block_pool.blocks
        if not block.is_null and block.ref_cnt != holders[block.block_id]
    ]


def _left_over(scheduler: Any) -> list[str]:
    """Return containers of ours that are not empty without any request."""
    admission, manager = scheduler.kv_policy_entry, scheduler.kv_policy_manager
    owners = {
        "planner": scheduler.kv_policy_planner,
        "admission": admission,
        "forecast": admission.forecast,
        "manager": manager,
    }
    # Of the scheduler itself what our classes add; the rest is vLLM's.
    own = {
        key: vars(scheduler)[key] for key in ("_sees_all", "_peaks_before_preemption")
    }
    for name, owner in owners.items():
        own |= {f"{name}.{key}": value for key, value in vars(owner).items()}
    own["manager.offers"] = manager.offers[0]._ended
    return [
        f"{name} has {value}"
        for name, value in own.items()
        if isinstance(value, dict | list | set) and value
    ]
