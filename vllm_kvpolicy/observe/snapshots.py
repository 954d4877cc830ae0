"""What the scheduler tells of its requests and its pool, while somebody listens."""

import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from struct import pack
from typing import Any

from vllm_kvpolicy.observe.metrics import only_observes
from vllm_kvpolicy.observe.shared_files import SCHEDULER, Ring
from vllm_kvpolicy.protocol import CompactEvent

PERIOD_SECONDS = 0.25  # between two snapshots
WALK_SECONDS = 1.0  # between two walks over all superblocks and prompts
MOST_ROWS = 512  # requests of a snapshot; the rest is only counted
MOST_TOKENS = 2**16  # of one request whose text is shown


class Snapshots:
    """Writes snapshots into the ring of an engine's scheduler.

    Args:
        with_text: token ids are told as well.
        on_off: hears of it where this has failed and tells no more.
    """

    def __init__(
        self, engine: str, with_text: bool, on_off: Callable[[], None]
    ) -> None:
        self.on_off = on_off
        self.ring = Ring(SCHEDULER.format(engine), create=True)
        self.with_text = with_text
        self._next = self._next_walk = 0.0
        self._cached, self._shared = 0, dict[str, int]()

    @only_observes
    def publish(self, scheduler: Any) -> None:
        """Write a snapshot if the last one is old, or if no request is left."""
        now = time.monotonic()
        if now < self._next and scheduler.requests:
            return
        self._next = now + PERIOD_SECONDS
        if not self.ring.is_heard():
            return
        found = self._look(scheduler, now)
        self.ring.append({"kind": "snapshot", "time": now, **found})

    @only_observes
    def publish_tokens(
        self, events: Iterable[CompactEvent], requests: Mapping[str, Any]
    ) -> None:
        """Write the token ids of requests that have an event, where text is shown."""
        if not (self.with_text and self.ring.is_heard()):
            return
        for event in events:
            known = requests[event.request_id].all_token_ids
            ids = known[: min(event.position, MOST_TOKENS)]
            text = b64encode(pack(f"<{len(ids)}i", *ids)).decode()
            record = {"kind": "tokens", "request": event.request_id, "ids": text}
            self.ring.append(record)

    @only_observes
    def publish_preemption(self, request: Any) -> None:
        """Write that a request gives back all that it holds and starts again."""
        if self.ring.is_heard():
            record = {"request": request.request_id, "at": time.time()}
            record["computed"] = request.num_computed_tokens
            self.ring.append({"kind": "preemption", **record})

    def _look(self, scheduler: Any, now: float) -> dict[str, Any]:
        """Return what a snapshot says, JSON-able; superblocks unless it says tokens."""
        manager = scheduler.kv_policy_manager
        pool = scheduler.kv_cache_manager.block_pool
        # vLLM still lists requests that end in this step.
        running = [r for r in scheduler.running if r.request_id in scheduler.requests]
        if now >= self._next_walk or not running:
            self._next_walk = now + WALK_SECONDS
            self._cached = sum(
                block.block_hash is not None and not block.ref_cnt
                for block in pool.blocks
            )
            self._shared = shared_blocks(running, manager)
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        local, survivors = manager.pool_counts()
        # Stock vLLM holds every token that is computed, common starts of prompts once.
        whole = [
            -(-request.num_computed_tokens // manager.block_size)
            - self._shared.get(request.request_id, 0)
            for request in running
        ]
        ids = {request.request_id for request in running}
        waiting = [r for r in scheduler.requests.values() if r.request_id not in ids]
        shown = [*running, *waiting][:MOST_ROWS]
        return {
            "pool": {
                "local": local,
                "global": survivors,
                "cached": min(self._cached, free),
                "free": free,
                "total": total,
                "stock": sum(whole),
            },
            "running": len(running),
            "stock_running": sum(held <= total for held in accumulate(whole)),
            "waiting": len(waiting),
            "requests": [_row(scheduler, r, r.request_id in ids) for r in shown],
        }


def shared_blocks(running: Sequence[Any], manager: Any) -> dict[str, int]:
    """Return the blocks of each running request that it has from an earlier one, by id.

    Stock vLLM takes the start of a prompt from the prefix cache when it schedules a
    request, all but the last token. It never merges blocks that are computed later,
    such as equal answers. The requests' blocks are those that stock vLLM would hold.

    Args:
        manager: a KVPolicyManager.
    """
    block_size = manager.block_size
    seen: set[Any] = set()
    shared = {}
    for request in running:
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        whole = manager.hashes(request)[: min(computed, prompt) // block_size]
        taken = whole[: (prompt - 1) // block_size]
        shared[request.request_id] = len(seen.intersection(taken))
        seen.update(whole)
    return shared


def _row(scheduler: Any, request: Any, is_running: bool) -> dict[str, Any]:
    """Return what a snapshot says of one request.

    `computed` and `held` are tokens per KV head, `blocks` and `returned` superblocks:
    those that it holds, and those that it would hold more without events. `budget` and
    `interval` are the request's own, in tokens; None without a policy, and the budget
    of a policy that takes none. `floor` is what calls leave of it at least, a prompt
    that is pinned included; None where no events are called for. `uncut` is false from
    its first event on, preempted or not.
    """
    state = scheduler.kv_policy_planner.states.get(request.request_id)
    computed = request.num_computed_tokens
    row = {
        "id": request.request_id,
        "policy": "none",
        "budget": None,
        "interval": None,
        "floor": None,
        "pinned": 0,
        "running": is_running,
        "prompt": request.num_prompt_tokens,
        "computed": computed,
        "held": computed,
        "blocks": scheduler.kv_policy_manager.num_held(request.request_id),
        "events": 0,
        "returned": 0,
        "uncut": True,
    }
    if state is not None:
        plan, events = state.plan, state.plan.footprint.events
        row |= {"policy": plan.policy, "budget": plan.budget}
        row |= {"interval": events.interval, "uncut": state.is_uncut}
        row |= {"floor": events.budget if plan.is_called else None}
        row["pinned"] = state.pinned_tokens
        row |= {"held": computed - state.dropped_tokens, "events": state.ordinal}
        row["returned"] = state.frontier_blocks - state.global_blocks
    return row
