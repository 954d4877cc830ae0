"""Query windows: lent from the pool with the first query, returned by the event.

Owns the tests of planner, manager and vLLM's block pool together where windows are
concerned, by hand; tests/engine/test_scheduler_simulation follows every row of them.
"""

from dataclasses import replace

import pytest

from support.pool_engine import FIRST, PLAN, Engine, N
from vllm_kvpolicy.protocol import StepCommands

# A superblock has room for 2N / G = 8 queries, so that a window takes three.
W, GROUP, TAKEN = 20, 4, 3
OPEN = FIRST - W  # the token of the first query that the event at 104 reads
PROMPT_BLOCKS = 7  # of 104 tokens
BLOCKS = 40


def make_engine(num_blocks: int = BLOCKS, names: str = "a", window: int = W) -> Engine:
    """Return an engine with requests of PLAN."""
    engine = Engine(num_blocks)
    for name in names:
        engine.add(name, window=window, group_size=GROUP)
    return engine


def step(engine: Engine, **wanted: tuple[int, int]) -> StepCommands:
    """Take one step of name=(computed, wanted) and return its commands."""
    counts = {
        name: engine.compute(name, computed, count) - computed
        for name, (computed, count) in wanted.items()
    }
    return engine.planner.finish_step(counts)


def at_the_event(num_blocks: int = BLOCKS, names: str = "a") -> Engine:
    """Return an engine whose requests have an event in the next step."""
    engine = make_engine(num_blocks, names)
    for name in names:
        assert step(engine, **{name: (0, FIRST)}).captures
    return engine


def window_of(engine: Engine, name: str = "a") -> tuple[int, ...]:
    return engine.planner.states[name].window


def test_a_window_is_taken_in_the_step_of_its_first_query_and_not_before():
    engine = make_engine()
    assert step(engine, a=(0, OPEN)).captures == ()
    assert engine.free == BLOCKS - 6 and window_of(engine) == ()
    (capture,) = step(engine, a=(OPEN, 1)).captures
    # The token at 84 has its place in the sixth superblock.
    assert engine.free == BLOCKS - 6 - TAKEN
    assert len(set(window_of(engine))) == TAKEN
    assert not set(window_of(engine)) & {0, *engine.ids("a")}
    assert capture.window_blocks == window_of(engine)
    assert (capture.first_token, capture.first_row, capture.num_tokens) == (0, 0, 1)


def test_a_window_that_rejected_drafts_have_opened_waits_for_its_queries():
    engine = make_engine()
    step(engine, a=(0, OPEN - 3))
    (opened,) = step(engine, a=(OPEN - 3, 5)).captures
    assert (opened.first_token, opened.first_row, opened.num_tokens) == (3, 0, 2)
    free, window = engine.free, window_of(engine)
    assert step(engine, a=(OPEN - 2, 1)).captures == (), "four drafts were rejected"
    assert (engine.free, window_of(engine)) == (free, window)
    (again,) = step(engine, a=(OPEN - 1, 3)).captures
    assert (again.first_token, again.first_row, again.num_tokens) == (1, 0, 2)
    assert again.window_blocks == window


def test_hits_leave_room_for_the_drafts_of_a_step():
    """A request with one token to compute computes as many drafts as any other."""
    engine = make_engine(window=3)
    plan = engine.planner.states["a"].plan
    hits = {
        drafts: replace(plan, num_drafts=drafts).usable_hit(200) for drafts in range(20)
    }
    for drafts, hit in hits.items():
        assert hit % N == 0 and hit + 1 + max(drafts, 3) <= FIRST
        assert hit + N + 1 + max(drafts, 3) > FIRST
    assert hits[0] == hits[3] > hits[19]


def test_the_room_check_counts_the_window():
    engine = make_engine()
    step(engine, a=(0, 80))
    for position, wanted in ((OPEN, 1), (OPEN + 1, 1 + TAKEN)):
        engine.planner.clip("a", 80, position - 80)
        assert engine.wanted("a", 80, position) == wanted
    engine = at_the_event()
    engine.planner.clip("a", FIRST, 1)
    # Six superblocks become four; the seventh has room for the token.
    assert engine.wanted("a", FIRST, FIRST + 1) == -2 - TAKEN
    # A step of 40 takes two superblocks, and the next window begins in it.
    engine.planner.clip("a", FIRST, 40)
    assert engine.wanted("a", FIRST, FIRST + 40) == -2 + 2


def test_the_event_names_its_window_and_returns_it():
    engine = at_the_event()
    window, free = window_of(engine), engine.free
    commands = step(engine, a=(FIRST, 1))
    assert commands.events[0].window_blocks == window and commands.captures == ()
    assert window_of(engine) == () and not engine.manager._windows
    assert engine.free == free + 2 + TAKEN


def test_the_next_window_may_begin_in_the_step_of_the_event():
    engine = at_the_event()
    before = window_of(engine)
    commands = step(engine, a=(FIRST, PLAN.interval - W + 3))
    (event,), (capture,) = commands.events, commands.captures
    assert event.window_blocks == before
    assert capture.window_blocks == window_of(engine) and len(window_of(engine)) == 3
    assert (capture.first_token, capture.first_row, capture.num_tokens) == (20, 0, 3)


@pytest.mark.parametrize("leave", ["preempt", "finish"])
@pytest.mark.parametrize("has_had_an_event", [False, True])
def test_preemption_and_end_return_the_window(leave: str, has_had_an_event: bool):
    engine = at_the_event(names="ab")
    ends = {"a": FIRST, "b": FIRST}
    if has_had_an_event:
        step(engine, a=(FIRST, 40), b=(FIRST, 40))
    assert len(window_of(engine)) == len(window_of(engine, "b")) == TAKEN
    getattr(engine, leave)("a")
    assert engine.free == BLOCKS - len(engine.held("b"))
    assert set(engine.planner._windows) == set(engine.manager._windows) == {"b"}
    assert engine.planner.finish_step({"b": ends["b"]}).captures[0].request_id == "b"
    if leave == "preempt":
        assert window_of(engine) == ()
        (capture,) = step(engine, a=(0, FIRST)).captures
        assert not set(capture.window_blocks) & set(engine.held("b"))


@pytest.mark.parametrize("start", [OPEN, FIRST])
def test_preemption_in_the_step_that_took_the_window(start: int):
    """With and without an event in the same step."""
    engine = make_engine()
    step(engine, a=(0, start))
    engine.compute("a", start, 100)
    assert window_of(engine)
    engine.preempt("a")
    commands = engine.planner.finish_step({})
    assert commands.events == commands.captures == ()
    assert engine.free == BLOCKS and not engine.manager._windows


def test_a_step_that_vllm_has_no_room_for_takes_nothing():
    engine = make_engine(PROMPT_BLOCKS + TAKEN - 1)
    step(engine, a=(0, OPEN))
    engine.planner.clip("a", OPEN, 100)
    assert engine.wanted("a", OPEN, FIRST) == 1 + TAKEN == engine.free + 1
    assert engine.planner.finish_step({}).captures == ()
    assert window_of(engine) == () and not engine.manager._windows
    # A shorter step fits.
    assert len(step(engine, a=(OPEN, 4)).captures) == 1


def test_a_request_whose_event_waits_keeps_its_window():
    engine = Engine(BLOCKS, events_per_step=1)
    for name in "ab":
        engine.add(name, window=W, group_size=GROUP)
        step(engine, **{name: (0, FIRST)})
    window = window_of(engine, "b")
    assert engine.planner.clip("a", FIRST, 1) == 1
    assert engine.planner.clip("b", FIRST, 1) == 0
    engine.manager.allocate_new_blocks("a", FIRST + 1, FIRST + 1)
    engine.planner.finish_step({"a": 1})
    assert window_of(engine, "b") == window
    commands = step(engine, b=(FIRST, 1))
    assert commands.events[0].window_blocks == window


def test_admission_counts_the_window_of_a_request_that_drops_nothing_before_it():
    """A peak above the superblocks of all its tokens is asked for in full."""
    engine = make_engine()
    assert engine.wanted("a", 0, OPEN, cap=True) == 6
    assert engine.wanted("a", 0, OPEN + 1, cap=True) == 6 + TAKEN
    assert engine.wanted("a", 0, FIRST, cap=True) == PROMPT_BLOCKS + TAKEN
    step(engine, a=(0, OPEN + 1))
    assert engine.wanted("a", OPEN + 1, FIRST, cap=True) == 1, "it holds its window"
