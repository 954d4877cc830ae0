"""The KV cache manager on vLLM's own block pool: what an event frees and keeps.

Owns the tests of ownership, refusals and admission; no model, no scheduler.
"""

import random
from dataclasses import replace

import pytest
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from support.engine_configs import Overlay
from support.pool_engine import FIRST, PLAN, RECENT, SPEC, Engine, N
from vllm_kvpolicy.block_manager.manager import (
    KVPolicyManager,
    KVPolicySpec,
)
from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.policies.testing import exchanged, shuffled


def test_an_event_frees_before_the_request_allocates():
    engine = Engine(num_blocks=7)
    engine.add("a")
    assert engine.compute("a", 0, 1000) == FIRST
    engine.planner.finish_step({"a": FIRST})
    before = engine.ids("a")
    assert engine.free == 0
    assert engine.compute("a", FIRST, 20) == 124
    event = engine.event("a", 20)
    # 6 blocks below the frontier become 4, and one new block is taken.
    assert engine.free == 2 - 1
    assert event.source_blocks == tuple(before[:6])
    assert event.dest_blocks == tuple(before[:4])
    assert event.local_blocks == (before[6],)
    assert engine.ids("a")[:7] == [*before[:4], 0, 0, before[6]]
    assert engine.manager.blocks_returned == 2


def test_the_next_event_starts_from_survivors_and_later_blocks():
    engine = Engine(num_blocks=20)
    engine.add("a")
    first, second = engine.advance("a", FIRST + 41)
    assert (first.position, second.position) == (FIRST, FIRST + 40)
    assert second.source_blocks[:4] == first.dest_blocks
    # F = 128 needs 48 of the 64 tokens: 3 blocks out of 4 survivors and 2 local.
    assert len(second.source_blocks) == 6 and len(second.dest_blocks) == 3
    assert second.source_blocks[4] == first.local_blocks[0]
    assert second.frontier_blocks == 8


@pytest.mark.parametrize("place", [None, shuffled, exchanged])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_ownership_is_local_plus_global_at_every_step(place, keeps_all):
    rng = random.Random(1)
    for _ in range(12):
        engine = Engine(200, place, keeps_all)
        plan = EventPlan(
            rng.randint(1, 300), rng.randint(24, 200), rng.randint(1, 80), 32
        )
        engine.add("a", plan)
        footprint = Footprint(plan, RECENT, N, keeps_all)
        position, seen, peak = 0, [], 0
        while position < 900:
            position = engine.compute("a", position, rng.choice((1, 99)))
            seen += engine.planner.finish_step({"a": 1}).events
            state, ids = engine.planner.states["a"], engine.ids("a")
            held = [block for block in ids if block]
            local = len(ids) - state.frontier_blocks
            assert len(held) == len(set(held)) == state.global_blocks + local
            assert engine.free == 200 - len(held), position
            gap = ids[state.global_blocks : state.frontier_blocks]
            assert not any(gap), "between the two pools there are only null blocks"
            assert engine.manager.pool_counts() == (local, state.global_blocks)
            peak = max(peak, len(held))
        assert [event.position for event in seen] == plan.positions_up_to(position)
        assert peak == footprint.peak_blocks(position)
        engine.finish("a")
        assert engine.free == 200
        assert engine.planner.num_global_blocks == 0


def test_exchanged_works_when_the_pool_is_empty():
    engine = Engine(7, exchanged)
    engine.add("a")
    engine.compute("a", 0, 1000)
    engine.planner.finish_step({"a": FIRST})
    assert engine.free == 0
    engine.compute("a", FIRST, 1)
    event = engine.event("a", 1)
    assert set(event.dest_blocks) <= set(event.source_blocks)
    assert len(event.dest_blocks) == 4 and engine.free == 2


def test_exchanged_takes_blocks_that_an_earlier_event_of_the_step_freed():
    engine = Engine(14, exchanged)
    for name in "ab":
        engine.add(name)
        engine.compute(name, 0, 1000)
    engine.planner.finish_step({"a": FIRST, "b": FIRST})
    assert engine.free == 0
    for name in "ab":
        engine.compute(name, FIRST, 1)
    first, second = engine.planner.finish_step({"a": 1, "b": 1}).events
    assert first.request_id == "a"
    freed = set(first.source_blocks) - set(first.dest_blocks)
    assert freed and freed == set(second.dest_blocks) - set(second.source_blocks)


def test_a_request_without_a_policy_keeps_every_block():
    engine = Engine(40)
    assert engine.compute("plain", 0, 600) == 600
    engine.manager.remove_skipped_blocks("plain", 600)
    assert len(set(engine.ids("plain"))) == 38 and engine.free == 2
    assert engine.wanted("plain", 600, 640, cap=True) == 2
    engine.manager.free("plain")
    assert engine.free == 40


def test_admission_asks_for_the_peak_of_that_request():
    engine = Engine(40)
    engine.add("bounded")
    engine.add("roomy", replace(PLAN, budget=2048))
    whole = -(-600 // N)
    peak = Footprint(PLAN, RECENT, N).peak_blocks(600)
    assert peak == 7 < whole
    assert engine.wanted("bounded", 0, 600, cap=True) == peak
    assert engine.wanted("roomy", 0, 600, cap=True) == whole
    assert engine.wanted("bounded", 0, 600) == whole, "a step asks for what it writes"
    assert engine.wanted("bounded", 0, 20, cap=True) == 2


def test_what_admission_promises_is_enough_for_the_whole_request():
    rng = random.Random(2)
    for _ in range(60):
        plan = EventPlan(
            rng.randint(1, 400), rng.randint(24, 150), rng.randint(1, 90), 48
        )
        last = rng.randint(plan.prompt_len, 700)
        window = rng.choice((0, rng.randint(1, plan.interval)))
        group_size, chunk = rng.randint(1, 5), rng.choice((1, 30, 1000))
        large = Engine(60)
        large.add("a", plan, window=window, group_size=group_size)
        promised = large.wanted("a", 0, last, cap=True)
        enough, too_small = Engine(promised), Engine(promised - 1)
        for engine in (enough, too_small):
            engine.add("a", plan, window=window, group_size=group_size)
        enough.advance("a", last, chunk)
        enough.finish("a")
        assert enough.free == promised
        with pytest.raises(AssertionError, match="superblocks wanted"):
            too_small.advance("a", last, chunk)


def test_spec_states_the_compressed_footprint(policy_config):
    """Of a request as long as vLLM asks about: at most what its tokens fill."""
    assert SPEC.page_size_bytes == 2 * 2 * 32 * 4 * N
    most = policy_config.model_config.max_model_len
    for length in (most, N):
        asked = Overlay(policy_config, {"model_config.max_model_len": length})
        held = SPEC.max_memory_usage_bytes(asked) // SPEC.page_size_bytes
        assert 0 < held <= length // N
    assert held == 1 and most // N > 9


def test_spec_merges_only_with_its_equal():
    """vLLM takes an AssertionError for layers that differ, and nothing else."""
    assert KVPolicySpec.merge([SPEC, replace(SPEC)]) == SPEC
    with pytest.raises(AssertionError, match="must have the same attention spec"):
        KVPolicySpec.merge([SPEC, replace(SPEC, head_size=64)])


def test_registration_leaves_vllm_its_own_specs():
    stock = FullAttentionSpec(
        block_size=N, num_kv_heads=2, head_size=32, dtype=SPEC.dtype
    )
    assert KVCacheSpecRegistry.get_manager_class(SPEC) is KVPolicyManager
    assert KVCacheSpecRegistry.get_manager_class(stock) is FullAttentionManager
