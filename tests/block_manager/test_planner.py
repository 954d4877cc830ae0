"""The planner by itself: clipping, events, sitting out, restarting.

Owns the tests of block_manager.planner that need no block pool; query windows are in
test_planner_windows.
"""

import pytest

from support.request_plans import request_plan
from vllm_kvpolicy.block_manager.planner import Planner
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.protocol import NO_COMMANDS
from vllm_kvpolicy.sizes import PlannerLimits

PLAN = EventPlan(prompt_len=10, budget=40, interval=20, prefill_interval=4096)
FIRST = 60  # K + I


def make_planner(events_per_step: int = 8, num_requests: int = 1) -> Planner:
    """Return a planner without windows and requests a, b, c... of PLAN."""
    planner = Planner(PlannerLimits(16, events_per_step))
    for name in "abcdefgh"[:num_requests]:
        planner.add(name, request_plan(planner, PLAN, 4, 2))
    return planner


def carry_out(planner: Planner, name: str) -> None:
    """Do the manager's part of an event with invented superblocks."""
    assert planner.due(name) is not None
    planner.record(name, (1, 2, 3), (1, 2), (4,))


def test_steps_end_at_the_next_event():
    planner = make_planner()
    assert planner.clip("a", 0, 10) == 10
    assert planner.clip("a", 0, 1000) == FIRST
    assert planner.clip("a", 59, 7) == 1
    assert planner.clip("a", 60, 7) == 7
    assert planner.clip("a", 60, 700) == 20
    assert planner.clip("a", 61, 700) == 19


@pytest.mark.parametrize("num_new", [0, -3])
def test_nothing_to_compute_stays_nothing_and_is_no_event(num_new):
    planner = make_planner()
    assert planner.clip("a", FIRST, num_new) == num_new
    assert planner.due("a") is None
    assert planner.clip("b", 0, num_new) == num_new


def test_a_request_without_a_policy_is_left_alone():
    planner = make_planner()
    assert planner.clip("stranger", FIRST, 5000) == 5000
    assert planner.due("stranger") is None
    assert planner.peak_blocks("stranger", 100) is None
    planner.restart("stranger")
    planner.remove("stranger")
    assert planner.finish_step({"stranger": 5000}) == NO_COMMANDS


def test_a_request_that_was_not_scheduled_is_asked_again():
    planner = make_planner(events_per_step=1)
    assert planner.clip("a", FIRST, 3) == 3
    # vLLM could not schedule it and preempted nobody; nothing was freed.
    assert planner.finish_step({}) == NO_COMMANDS
    assert planner.clip("a", FIRST, 3) == 3
    carry_out(planner, "a")
    (event,) = planner.finish_step({"a": 3}).events
    assert (event.position, event.ordinal) == (FIRST, 0)


def test_the_message_says_what_happened():
    planner = make_planner()
    planner.clip("a", FIRST, 1)
    assert planner.due("a") is not None
    planner.record("a", (5, 6, 7), (7, 5), (9, 8))
    commands = planner.finish_step({"a": 1})
    (event,) = commands.events
    assert event.request_id == "a"
    assert event.position == FIRST
    assert event.frontier_blocks == (FIRST - 4) // 16 == 3
    assert (event.budget, event.sinks) == (40, 2)
    assert event.source_blocks == (5, 6, 7)
    assert event.dest_blocks == (7, 5)
    assert event.local_blocks == (9, 8)
    assert (event.policy, event.prompt_tokens, event.serial) == ("tova", 10, 0)
    assert event.num_global == 0 and event.leaving_blocks == event.source_blocks
    assert event.window_blocks == ()
    state = planner.states["a"]
    assert (state.frontier_blocks, state.global_blocks) == (3, 2)
    assert state.dropped_tokens == 16
    assert planner.finish_step({"a": 1}) == NO_COMMANDS, "an event travels once"


def test_the_surplus_of_events_sits_out_and_comes_next():
    planner = make_planner(events_per_step=2, num_requests=5)
    at = dict.fromkeys("abcde", FIRST)
    seen = []
    for _ in range(3):
        scheduled = {name: planner.clip(name, at[name], 1) for name in at}
        scheduled = {name: count for name, count in scheduled.items() if count}
        for name in scheduled:
            if at[name] == FIRST:
                carry_out(planner, name)
        commands = planner.finish_step(scheduled)
        assert all(event.position == FIRST for event in commands.events)
        seen.append([event.request_id for event in commands.events])
        for name, count in scheduled.items():
            at[name] += count
    assert seen == [["a", "b"], ["c", "d"], ["e"]]


def test_a_late_event_that_sits_out_is_no_longer_about_to_come():
    """It had its place in a step and wanted for superblocks: those come of others'."""
    planner = make_planner(events_per_step=1, num_requests=3)
    assert [planner.clip(name, FIRST, 1) for name in "ab"] == [1, 0]
    assert planner.coming_event("b") == FIRST, "it waits for a place only"
    carry_out(planner, "a")
    planner.finish_step({"a": 1})
    assert planner.clip("b", FIRST, 1) == 1, "invited"
    planner.sit_out("b")
    assert planner.coming_event("b") == FIRST + PLAN.interval
    assert planner.clip("c", FIRST, 1) == 1, "the place is free again"
    planner.sit_out("c")
    assert planner.clip("a", FIRST + PLAN.interval, 1) == 1
    assert planner.clip("b", FIRST, 1) == 0, "one place, and a has it"
    assert planner.coming_event("b") == FIRST
    carry_out(planner, "a")
    planner.finish_step({"a": 1})
    assert planner.clip("b", FIRST, 1) == 1


def test_an_event_of_a_request_that_does_not_run_is_an_error():
    planner = make_planner(num_requests=2)
    for name in "ab":
        planner.clip(name, FIRST, 1)
        carry_out(planner, name)
    with pytest.raises(RuntimeError, match=r"\['b'\].*superblocks are lost"):
        planner.finish_step({"a": 1})


def test_preemption_after_the_event_forgets_it_and_keeps_the_order_of_the_rest():
    planner = make_planner(num_requests=3)
    for name in "abc":
        planner.clip(name, FIRST, 1)
        carry_out(planner, name)
    assert planner.num_global_blocks == 6
    planner.restart("b")
    assert planner.num_global_blocks == 4
    commands = planner.finish_step({"a": 1, "c": 1})
    assert [event.request_id for event in commands.events] == ["a", "c"]


def test_the_order_of_visits_starves_nobody():
    """More events than a step carries, and always the same requests come first."""
    num_requests, interval, num_steps = 64, 4, 400
    planner = Planner(PlannerLimits(block_size=16, events_per_step=2))
    computed = {f"r{number}": 0 for number in range(num_requests)}
    for request_id in computed:
        planner.add(
            request_id,
            request_plan(planner, EventPlan(1, 64, interval, 64), 8, 4),
        )
    for _ in range(num_steps):
        scheduled = {}
        for request_id, position in computed.items():
            if num_new := planner.clip(request_id, position, 1):
                scheduled[request_id] = num_new
                if planner.due(request_id):
                    planner.record(request_id, (1,), (1,), (2,))
        planner.finish_step(scheduled)
        for request_id, num_new in scheduled.items():
            computed[request_id] += num_new
    slowest, fastest = min(computed.values()), max(computed.values())
    assert slowest > 68, "the last request never had its first event"
    assert fastest - slowest <= 2 * interval
