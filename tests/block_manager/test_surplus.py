"""What an event turned out not to need: given back once, and only while it is so.

Owns the tests of `surplus` and `give_back_surplus` by hand, late answers included;
tests/engine/test_scheduler_simulation sends them late, or never, at random.
"""

import pytest

from support.pool_engine import FIRST, PLAN, RECENT, Engine, N
from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.protocol import CompactEvent, UsedBlocks

BLOCKS = 40
SECOND = FIRST + PLAN.interval


def answer(event: CompactEvent, num_blocks: int) -> UsedBlocks:
    return UsedBlocks(event.request_id, event.serial, num_blocks)


def after_first_event(name: str = "a") -> tuple[Engine, CompactEvent]:
    """Return an engine whose request has had one event: 4 destinations, 1 local block.

    One more block was taken for the step's token.
    """
    engine = Engine(BLOCKS)
    engine.add(name)
    (event,) = engine.advance(name, FIRST + 1)
    assert len(event.dest_blocks) == 4 and engine.free == BLOCKS - 5
    return engine, event


def dropped(engine: Engine) -> list[tuple[int, float]]:
    state = engine.planner.states["a"]
    assert all(budget == PLAN.budget for _, _, budget in state.dropped.values())
    return [each[:2] for each in state.dropped.values()]


def test_the_last_destinations_are_freed_and_local_blocks_stay():
    engine, event = after_first_event()
    before = engine.ids("a")
    returned = engine.manager.blocks_returned
    engine.manager.give_back_surplus(answer(event, 1))
    dest = event.dest_blocks
    assert engine.ids("a") == [dest[0], 0, 0, 0, 0, 0, *before[6:]]
    assert engine.free == BLOCKS - 2
    assert engine.manager.blocks_returned == returned + 3
    assert engine.manager.pool_counts() == (1, 1)
    assert engine.planner.states["a"].dropped_tokens == 5 * N
    taken = [block.block_id for block in engine.pool.get_new_blocks(engine.free)]
    assert set(dest[1:]) <= set(taken) and not set(taken) & set(engine.held("a"))


def test_the_most_held_is_what_the_step_of_an_event_took_before_the_answer():
    """Events that may keep everything free nothing; the step takes one block more."""
    engine = Engine(BLOCKS, keeps_all=True)
    engine.add("a")
    before = -(-FIRST // N)
    (event,) = engine.advance("a", FIRST + N)
    assert engine.planner.states["a"].most_held == before
    assert len(engine.held("a")) == before + 1
    engine.manager.give_back_surplus(answer(event, 1))
    assert len(engine.held("a")) == 3
    assert engine.planner.states["a"].most_held == before + 1
    engine.manager.give_back_surplus(answer(event, 1))
    assert engine.planner.states["a"].most_held == before + 1


def test_what_is_dropped_is_known_with_the_answer():
    """Of 96 tokens below the frontier 4 blocks of 16 may stay, then 1.75 of 2 do."""
    engine, event = after_first_event()
    assert dropped(engine) == [(FIRST, 2 * N)]
    engine.manager.give_back_surplus(UsedBlocks("a", event.serial, 2, slack=0.25))
    assert dropped(engine) == [(FIRST, 4.25 * N)]
    stale = UsedBlocks("a", event.serial + 1, 1, slack=0.5)
    engine.manager.give_back_surplus(stale)
    assert dropped(engine) == [(FIRST, 4.25 * N)]
    engine.manager.free("a")
    assert not engine.planner.states["a"].is_uncut
    engine.planner.restart("a")
    assert dropped(engine) == []
    (earlier,) = engine.planner.states["a"].earlier
    assert earlier == (FIRST, 4.25 * N, PLAN.budget)
    assert not engine.planner.states["a"].is_uncut


def test_an_event_of_the_step_of_a_preemption_has_not_been():
    """vLLM preempts a request that it has scheduled, events and all."""
    engine = Engine(BLOCKS)
    engine.add("a")
    end = engine.compute("a", 0, FIRST)
    engine.planner.finish_step({"a": FIRST})
    engine.compute("a", end, 1)
    assert dropped(engine)
    engine.manager.free("a")
    engine.planner.restart("a")
    assert engine.planner.states["a"].is_uncut
    assert not engine.planner.finish_step({}).events


def test_heads_may_leave_pages_empty_where_all_blocks_are_in_use():
    engine, event = after_first_event()
    used = UsedBlocks("a", event.serial, len(event.dest_blocks), slack=0.5)
    engine.manager.give_back_surplus(used)
    assert dropped(engine) == [(FIRST, 2.5 * N)]
    assert engine.free == BLOCKS - 5


def test_what_is_dropped_is_known_with_an_answer_after_the_next_event():
    """Steps are scheduled before the answers of the last one are read."""
    engine, event = after_first_event()
    end = engine.compute("a", FIRST + 1, 1000)
    engine.planner.finish_step({"a": 1})
    engine.compute("a", end, 1)
    (second,) = engine.planner.finish_step({"a": 1}).events
    certain = dropped(engine)[1]
    free = engine.free
    engine.manager.give_back_surplus(UsedBlocks("a", event.serial, 2, slack=0.25))
    assert dropped(engine) == [(FIRST, 4.25 * N), certain] and engine.free == free
    used = UsedBlocks("a", second.serial, 1, slack=0.5)
    engine.manager.give_back_surplus(used)
    assert dropped(engine)[0] == (FIRST, 4.25 * N)
    assert dropped(engine)[1] == (SECOND, (second.frontier_blocks - 0.5) * N)


@pytest.mark.parametrize("num_blocks", [4, 5, 99])
def test_there_may_be_nothing_to_give_back(num_blocks):
    engine, event = after_first_event()
    before = engine.ids("a")
    assert engine.planner.surplus(answer(event, num_blocks)) is None
    engine.manager.give_back_surplus(answer(event, num_blocks))
    assert engine.ids("a") == before and engine.free == BLOCKS - 5


def test_an_answer_counts_once():
    engine, event = after_first_event()
    engine.manager.give_back_surplus(answer(event, 2))
    before = engine.ids("a"), engine.free, engine.manager.blocks_returned
    engine.manager.give_back_surplus(answer(event, 2))
    assert before == (engine.ids("a"), engine.free, engine.manager.blocks_returned)


def test_a_restart_makes_the_answer_stale():
    engine, event = after_first_event()
    engine.manager.free("a")
    engine.planner.restart("a")
    engine.manager.give_back_surplus(answer(event, 1))
    assert engine.free == BLOCKS
    (again,) = engine.advance("a", FIRST + 1)
    assert again.ordinal == event.ordinal == 0
    before = engine.ids("a")
    engine.manager.give_back_surplus(answer(event, 1))
    assert engine.ids("a") == before, "the event of another life"
    engine.manager.give_back_surplus(answer(again, 1))
    assert len(engine.held("a")) == 2


def test_the_next_event_starts_from_what_was_left():
    engine, event = after_first_event()
    engine.manager.give_back_surplus(answer(event, 1))
    end = engine.compute("a", FIRST + 1, 1000)
    engine.planner.finish_step({"a": 1})
    before = engine.ids("a")
    engine.compute("a", end, 1)
    (second,) = engine.planner.finish_step({"a": 1}).events
    assert second.num_global == 1
    assert second.source_blocks == (event.dest_blocks[0], *before[6:8])
    assert second.leaving_blocks == tuple(before[6:8])
    assert second.local_blocks == tuple(before[8:])


def test_an_event_may_find_fewer_blocks_than_it_may_fill():
    """An interval that frees less than a block: local blocks keep their places."""
    engine = Engine(BLOCKS)
    plan = EventPlan(prompt_len=10, budget=64, interval=8, prefill_interval=4096)
    engine.add("a", plan)
    position, few = 0, 0
    while position < 300:
        before = engine.ids("a")
        after = engine.compute("a", position, 1000)
        for event in engine.planner.finish_step({"a": 1}).events:
            frontier = (position - RECENT) // N
            assert event.dest_blocks == event.source_blocks[:4]
            assert event.local_blocks == tuple(before[frontier:])
            few += len(event.dest_blocks) < 4
            engine.manager.give_back_surplus(answer(event, 1))
            assert engine.free == BLOCKS - len(engine.held("a"))
        ids = engine.ids("a")
        assert len(ids) == -(-after // N), "one entry per logical block"
        assert ids[: len(before)][-1:] == before[-1:]
        position = after
    assert few > 20


def test_admission_and_bounds_count_what_is_really_held():
    engine, event = after_first_event()
    footprint = Footprint(PLAN, RECENT, N)
    peak = footprint.peak_blocks(600)
    assert engine.wanted("a", FIRST + 1, 600, cap=True) == peak - 5
    engine.manager.give_back_surplus(answer(event, 1))
    assert engine.wanted("a", FIRST + 1, 600, cap=True) == peak - 2
