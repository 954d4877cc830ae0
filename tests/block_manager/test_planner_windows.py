"""Query windows of the planner: who gets a slot, what is captured, when it is free.

Owns the tests of the window pool, by hand and under many random operations.
"""

import random

from support.request_plans import request_plan
from vllm_kvpolicy.block_manager.planner import NO_WINDOW, Planner
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.sizes import PlannerLimits

W = 8
PLAN = EventPlan(prompt_len=10, budget=40, interval=20, prefill_interval=4096)
FIRST = 60  # K + I; its window is 52..59


def make_planner(window_slots: int, names: str = "ab", **changes: int) -> Planner:
    """Return a planner with W = 8 and requests of PLAN."""
    limits = {"events_per_step": 8, "block_size": 16, "window_tokens": W} | changes
    planner = Planner(PlannerLimits(window_slots=window_slots, **limits))
    for name in names:
        planner.add(name, request_plan(planner, PLAN, 4, 2))
    return planner


def step(planner: Planner, **requests: tuple[int, int]):
    """Take one step of name=(computed, wanted); return counts and commands."""
    counts = {}
    for name, (computed, wanted) in requests.items():
        count = planner.clip(name, computed, wanted)
        if count and planner.due(name) is not None:
            planner.record(name, (1, 2, 3), (1, 2), (4,))
        if count:
            counts[name] = count
    return counts, planner.finish_step(counts)


def num_open(planner: Planner) -> int:
    return planner.limits.window_slots - len(planner._free_windows)


def test_a_step_before_the_window_opens_nothing():
    planner = make_planner(1)
    counts, commands = step(planner, a=(0, 52))
    assert counts == {"a": 52} and commands.captures == ()
    assert num_open(planner) == 0


def test_a_step_that_ends_in_the_window_captures_its_tail():
    planner = make_planner(1)
    _, commands = step(planner, a=(40, 15))
    (capture,) = commands.captures
    assert (capture.first_token, capture.first_row, capture.num_tokens) == (12, 0, 3)
    _, commands = step(planner, a=(55, 100))
    (capture,) = commands.captures
    assert (capture.first_token, capture.first_row, capture.num_tokens) == (0, 3, 5)
    assert capture.window_slot == planner.states["a"].window != NO_WINDOW


def test_the_event_names_the_slot_and_gives_it_back():
    planner = make_planner(1)
    _, commands = step(planner, a=(40, 20))
    slot = commands.captures[0].window_slot
    _, commands = step(planner, a=(FIRST, 1))
    assert commands.events[0].window_slot == slot
    assert commands.captures == ()
    assert num_open(planner) == 0
    assert planner.states["a"].window == NO_WINDOW


def test_the_next_window_may_begin_in_the_step_of_the_event():
    planner = make_planner(1)
    _, before = step(planner, a=(40, 20))
    _, commands = step(planner, a=(FIRST, 15))
    assert commands.events[0].window_slot == before.captures[0].window_slot
    (capture,) = commands.captures
    assert capture.window_slot == commands.events[0].window_slot
    assert (capture.first_token, capture.first_row, capture.num_tokens) == (12, 0, 3)
    assert num_open(planner) == 1


def test_a_window_as_long_as_the_interval_never_closes():
    planner = make_planner(1, window_tokens=20)
    _, commands = step(planner, a=(0, FIRST))
    assert commands.captures[0].num_tokens == 20
    for position in (60, 80, 100):
        counts, commands = step(planner, a=(position, 50))
        assert counts == {"a": 20}
        assert commands.events[0].window_slot == commands.captures[0].window_slot
        assert commands.captures[0].num_tokens == 20
    assert num_open(planner) == 1


def test_without_a_free_slot_a_step_ends_before_the_window():
    planner = make_planner(1)
    counts, commands = step(planner, a=(50, 5), b=(30, 100))
    assert counts == {"a": 5, "b": 22}, "b stops at 52"
    assert [capture.request_id for capture in commands.captures] == ["a"]


def test_without_a_free_slot_a_request_at_its_window_sits_out_until_one_is_free():
    planner = make_planner(1)
    step(planner, a=(50, 5))
    counts, _ = step(planner, a=(55, 5), b=(52, 1))
    assert counts == {"a": 5}
    counts, _ = step(planner, a=(60, 1), b=(52, 1))
    assert counts == {"a": 1}, "a's slot is free only after the step of its event"
    counts, commands = step(planner, a=(61, 1), b=(52, 1))
    assert counts == {"a": 1, "b": 1}
    assert commands.captures[0].first_row == 0


def test_a_request_that_was_never_admitted_gives_its_slot_back():
    planner = make_planner(1)
    assert planner.clip("a", 0, 55) == 55
    assert num_open(planner) == 1
    planner.finish_step({})  # vLLM had no blocks for it
    assert num_open(planner) == 0
    assert planner.states["a"].window == NO_WINDOW


def test_a_request_that_sits_a_step_out_keeps_its_window():
    planner = make_planner(1)
    step(planner, a=(50, 5))
    planner.finish_step({})
    assert num_open(planner) == 1
    _, commands = step(planner, a=(55, 5))
    assert commands.captures[0].first_row == 3


def test_preemption_and_end_give_slots_back_and_they_are_used_again():
    planner = make_planner(2)
    step(planner, a=(50, 5), b=(50, 5))
    assert num_open(planner) == 2
    planner.restart("a")
    assert num_open(planner) == 1
    planner.remove("b")
    assert num_open(planner) == 0
    planner.add("c", request_plan(planner, PLAN, 4, 2))
    _, commands = step(planner, a=(50, 5), c=(51, 5))
    assert {capture.window_slot for capture in commands.captures} == {0, 1}


def test_preemption_in_the_step_that_opened_the_window():
    planner = make_planner(1)
    planner.clip("a", 50, 5)
    planner.restart("a")
    assert planner.finish_step({}).captures == ()
    assert num_open(planner) == 0
    counts, _ = step(planner, b=(50, 5))
    assert counts == {"b": 5}


class Traffic:
    """Random steps, preemptions and ends; every window is followed row by row."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.window = rng.randint(1, 12)
        self.slots = rng.randint(1, 4)
        self.planner = make_planner(
            self.slots,
            names="",
            window_tokens=self.window,
            events_per_step=rng.randint(1, 3),
        )
        self.computed: dict[str, int] = {}
        self.rows: list[list] = [[None] * self.window for _ in range(self.slots)]
        self.born = self.events = self.sat_out = self.lost = 0

    def step(self) -> None:
        rng, planner = self.rng, self.planner
        if len(self.computed) < 6:
            interval = self.window + rng.randrange(12)
            grid = 16 * rng.randint(1, 4)
            plan = EventPlan(rng.randint(1, 90), rng.randint(20, 50), interval, grid)
            self.computed[f"r{self.born}"] = 0
            planner.add(
                f"r{self.born}",
                request_plan(planner, plan, rng.randrange(4), 0),
            )
            self.born += 1
        counts = {}
        for name in rng.sample(list(self.computed), len(self.computed)):
            wanted = rng.choice((1, 1, 7, 40))
            count = planner.clip(name, self.computed[name], wanted)
            self.sat_out += count == 0
            if count:
                self._allocate(name, count, counts)
        self._check(planner.finish_step(counts), counts)
        for name in list(self.computed):
            if rng.random() < 0.02:
                planner.remove(name)
                del self.computed[name]

    def _allocate(self, name: str, count: int, counts: dict[str, int]) -> None:
        """Play vLLM: admit or not, preempt before or after the event, or run."""
        rng, planner = self.rng, self.planner
        if self.computed[name] == 0 and rng.random() < 0.3:
            return
        if planner.due(name) is not None:
            planner.record(name, (1,), (1,), ())
        if rng.random() < 0.03:
            planner.restart(name)
            self.computed[name] = 0
            self.lost += 1
        else:
            counts[name] = count

    def _check(self, commands, counts: dict[str, int]) -> None:
        for event in commands.events:
            start = event.position - self.window
            expected = [(event.request_id, start + row) for row in range(self.window)]
            assert self.rows[event.window_slot] == expected
            self.events += 1
        for capture in commands.captures:
            name, rows = capture.request_id, self.rows[capture.window_slot]
            assert capture.first_token + capture.num_tokens <= counts[name]
            for index in range(capture.num_tokens):
                token = self.computed[name] + capture.first_token + index
                rows[capture.first_row + index] = (name, token)
        for name, count in counts.items():
            self.computed[name] += count
        free, windows = self.planner._free_windows, self.planner._windows
        held = [state.window for state in windows.values()]
        assert sorted(free + held) == list(range(self.slots)), "lost or shared"
        for name, state in self.planner.states.items():
            assert (state.window != NO_WINDOW) == (name in windows)


def test_no_window_is_lost_shared_or_mixed_up_under_random_traffic():
    events = sat_out = lost = 0
    for seed in range(60):
        traffic = Traffic(seed)
        for _ in range(300):
            traffic.step()
        for name in list(traffic.planner.states):
            traffic.planner.remove(name)
        assert sorted(traffic.planner._free_windows) == list(range(traffic.slots))
        assert not traffic.planner._windows
        events, sat_out = events + traffic.events, sat_out + traffic.sat_out
        lost += traffic.lost
    assert events > 5000 and sat_out > 5000 and lost > 500, (events, sat_out, lost)
