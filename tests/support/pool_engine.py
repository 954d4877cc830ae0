"""Planner, manager and vLLM's own block pool, without a scheduler."""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool

from support.request_plans import request_plan
from vllm_kvpolicy.block_manager.manager import KVPolicyManager, KVPolicySpec
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks
from vllm_kvpolicy.block_manager.planner import Planner
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.sizes import PlannerLimits

N, RECENT = 16, 4
PLAN = EventPlan(prompt_len=10, budget=64, interval=40, prefill_interval=4096)
FIRST = 104  # K + I: F = 96, 8 local tokens, 6 owned blocks, 4 needed for 56 tokens
SPEC = KVPolicySpec(block_size=N, num_kv_heads=2, head_size=32, dtype=torch.float32)


class Engine:
    """Planner, manager and pool, driven as vLLM's `allocate_slots` does.

    Args:
        num_blocks: of the pool, without the null block.
        place: chooses the superblocks of survivors; None for the oldest.
        keeps_all: events drop nothing.
        block_size: N.
        caching: vLLM's prefix cache is on.
        events_per_step: events that one step may carry.
    """

    def __init__(
        self,
        num_blocks: int,
        place: Any = None,
        keeps_all: bool = False,
        block_size: int = N,
        caching: bool = False,
        events_per_step: int = 99,
    ) -> None:
        self.pool = BlockPool(num_blocks + 1, caching, hash_block_size=block_size)
        self.planner = Planner(PlannerLimits(block_size, events_per_step))
        self.keeps_all = keeps_all
        self.manager = KVPolicyManager(
            replace(SPEC, block_size=block_size),
            block_pool=self.pool,
            enable_caching=caching,
            kv_cache_group_id=0,
            scheduler_block_size=block_size,
        )
        self.manager.attach(self.planner, OtherBlocks(), place)

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def ids(self, name: str) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks[name]]

    def add(
        self,
        name: str,
        plan: EventPlan = PLAN,
        recent: int = RECENT,
        window: int = 0,
        group_size: int = 2,
    ) -> None:
        windows = window, group_size
        self.planner.add(
            name, request_plan(self.planner, plan, recent, 2, self.keeps_all, *windows)
        )

    def wanted(self, name: str, start: int, end: int, cap: bool = False) -> int:
        return self.manager.get_num_blocks_to_allocate(
            name, end, (), start, start, end, apply_admission_cap=cap
        )

    def compute(self, name: str, start: int, wanted: int) -> int:
        """Schedule one request for one step; return the position it reaches."""
        end = start + self.planner.clip(name, start, wanted)
        announced, before = self.wanted(name, start, end), self.free
        assert announced <= before, f"{announced} superblocks wanted, {before} free"
        self.manager.allocate_new_blocks(name, end, end)
        assert before - self.free == announced, "the room check counted otherwise"
        return end

    def event(self, name: str, end: int) -> CompactEvent:
        (event,) = self.planner.finish_step({name: end}).events
        return event

    def held(self, name: str) -> list[int]:
        """Return the superblocks that a request holds, its query window last."""
        window = self.planner.states[name].window
        return [block for block in self.ids(name) if block] + list(window)

    def preempt(self, name: str) -> None:
        self.manager.free(name)
        self.planner.restart(name)

    def finish(self, name: str) -> None:
        self.manager.free(name)
        self.planner.remove(name)

    def advance(self, name: str, last: int, chunk: int = 1000) -> list[CompactEvent]:
        """Compute tokens 0..last-1 in chunks; return the events on the way."""
        position = 0
        events: list[CompactEvent] = []
        while position < last:
            position = self.compute(name, position, min(chunk, last - position))
            events += self.planner.finish_step({name: 1}).events
        return events
