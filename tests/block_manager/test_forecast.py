"""What requests will hold, step by step, against a walk over their tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest

from vllm_kvpolicy.block_manager.forecast import Forecast, held_levels, most_ahead
from vllm_kvpolicy.events import EventPlan, Footprint


def walk(footprint: Footprint, last: int) -> list[int]:
    """Return the most superblocks held in the step of each token, one at a time."""
    levels, held, survivors, frontier, window = [], 0, 0, 0, 0
    for token in range(last):
        before = held
        events = footprint.events
        has_event = token > 0 and events.next_event(token) == token
        if has_event:
            frontier = footprint.frontier_blocks(token)
            survivors, window = footprint.global_blocks(token), 0
        if token >= events.next_event(token + 1) - footprint.window_tokens:
            window = footprint.window_blocks
        blocks = token // footprint.block_size + 1
        held = survivors + blocks - frontier + window
        levels.append(max(before, held) if has_event else held)
    return levels


def random_footprint(rng: random.Random) -> Footprint:
    block_size, recent = rng.choice((4, 16)), rng.randrange(20)
    interval = rng.randint(4, 60)
    window = rng.randrange(min(interval, 9))
    plan = EventPlan(
        prompt_len=rng.randint(1, 300),
        budget=recent + block_size + rng.randint(1, 90),
        interval=interval,
        prefill_interval=block_size * rng.randint(3, 9),
        phase=rng.randrange(2**32),
        window_tokens=window,
    )
    lent = rng.randint(1, 3) if window else 0
    return Footprint(plan, recent, block_size, rng.random() < 0.1, lent)


def test_levels_are_those_of_a_walk_and_their_peak_is_the_closed_form():
    rng = random.Random(1)
    for _ in range(1500):
        footprint = random_footprint(rng)
        expected = walk(footprint, 400)
        first = rng.randrange(400)
        last = rng.randint(first + 1, 400)
        found = held_levels(footprint, first, last)
        assert found.tolist() == expected[first:last], (footprint, first, last)
        assert max(expected) == footprint.peak_blocks(400), footprint


def test_the_sum_follows_bookings_as_steps_pass():
    rng = random.Random(2)
    forecast, booked = Forecast(), {}  # by request: (first step, levels)
    for step in range(3000):
        forecast.step = step
        name = f"r{rng.randrange(12)}"
        draw = rng.random()
        if draw < 0.1:
            forecast.cancel(name)
            booked.pop(name, None)
        elif draw < 0.2:
            size = rng.choice((1, 5, 300, 2500))
            levels = np.array([rng.randint(1, 9) for _ in range(size)])
            forecast.book(name, levels, offset=None)
            booked[name] = step, levels
        coming = np.zeros(2600, np.int64)
        for start, levels in booked.values():
            left = levels[step - start :]
            coming[: len(left)] += left
        asked = np.array([rng.randint(0, 5) for _ in range(rng.choice((1, 40, 2600)))])
        assert (forecast.beside(asked) == coming[: len(asked)] + asked).all()
        assert forecast.most() == coming.max()


def test_phases_that_differ_make_the_sum_flat():
    plan = EventPlan(200, 256, 128, 4096)
    forecast, together = Forecast(), Forecast()
    for number in range(16):
        spread = Footprint(replace(plan, phase=number * 2**28), 32, 16)
        forecast.book(f"r{number}", held_levels(spread, 200, 800), None)
        same = Footprint(plan, 32, 16)
        together.book(f"r{number}", held_levels(same, 200, 800), None)
    assert together.most() == 16 * 24
    assert forecast.most() < 0.9 * together.most()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_horizon_one_step_short_misses_the_peak(is_last):
    """The last token before an event is the one that counts."""
    footprint = Footprint(EventPlan(1, 32, 16, 4096, 0, 4), 0, 16, False, 2)
    levels = held_levels(footprint, 1, 48 + is_last)
    assert levels.max() == 3 + 2
    assert held_levels(footprint, 1, 44).max() == 3, "the window is not open yet"


@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 36, 200])
@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_the_most_ahead_is_that_of_the_next_levels(length: int, ahead: int) -> None:
    levels = np.random.default_rng(length).integers(0, 50, length)
    found = most_ahead(levels, ahead)
    assert found.tolist() == [
        levels[place : place + ahead + 1].max() for place in range(length)
    ]
