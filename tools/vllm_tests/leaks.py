"""What a scheduler holds on to for requests that have gone."""

import time
from collections import Counter
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.request import RequestStatus

HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)
SECONDS = 20  # that a server gets to end its last requests


def find(scheduler: Any) -> list[str]:
    """Return what is held by no request; abort those that there are first."""
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


def find_served(url: str) -> tuple[list[str], int]:
    """Return what a server holds behind its last request, and its number of events."""
    end = time.monotonic() + SECONDS
    while True:
        with urlopen(url) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        values = {each.name: each.value for own in families for each in own.samples}
        found = [f"{name} is {values[name]}" for name in HELD if values[name]]
        if not found or time.monotonic() > end:
            return found, int(values["kvpolicy_events_total"])
        time.sleep(0.5)


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
        "sharing": admission.shared,
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
