"""Foresees the superblocks that running requests will hold in every coming step.

A running request computes one token a step, its events come at known positions, and it
ends after a known number of tokens. So what it holds is a known saw-tooth, and what all
of them hold together is the sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.sizes import SlidingGroups

HORIZON = 8192  # steps; what a request holds later is booked when they have passed


def held_levels(footprint: Footprint, first: int, last: int) -> np.ndarray:
    """Return [last - first] int64: most superblocks held while each token is computed.

    In a step with an event that is what the request holds before it or after it,
    whichever is more, because other requests may take superblocks before the event.

    Example: K = 64, I = 32, R = 8, N = 16 and a prompt of 100 tokens, which ends in an
    event. Tokens 99 to 101, and 111 and 112, are computed with these superblocks:

    >>> footprint = Footprint(EventPlan(100, 64, 32, 4096), recent=8, block_size=16)
    >>> held_levels(footprint, 99, 102), held_levels(footprint, 111, 113)
    (array([7, 7, 5]), array([5, 6]))

    Args:
        first: position of the first token; one is computed in each step.
        last: position behind the last one.
    """
    token = np.arange(first, last)
    events = _events(footprint.events, last)
    number = np.searchsorted(events, token, side="right")  # of events so far
    held = _held(footprint, events, number, token)
    at_event = events[(events >= first) & (events < last)] - first
    before = _held(footprint, events, number[at_event] - 1, token[at_event] - 1)
    held[at_event] = np.maximum(held[at_event], before)
    return held


def _events(plan: EventPlan, last: int) -> np.ndarray:
    """Return the event positions up to the first one at or after `last`."""
    found, position = [], plan.next_event(0)
    while position <= plan.prompt_len and position < last:
        found.append(position)
        position = plan.next_event(position + 1)
    steps = np.arange(max(-(-(last - position) // plan.interval), 0) + 1)
    return np.concatenate([found, position + steps * plan.interval]).astype(np.int64)


def _held(
    footprint: Footprint, events: Any, number: np.ndarray, token: np.ndarray
) -> np.ndarray:
    """Return what is held once a token is computed and `number` events have passed.

    The closed forms of one event take an array of them, too.
    """
    frontier = np.insert(footprint.frontier_blocks(events), 0, 0)[number]
    kept = np.insert(footprint.global_blocks(events), 0, 0)[number]
    held = kept - (-(token + 1) // footprint.block_size) - frontier
    has_window = token >= events[number] - footprint.window_tokens
    return held + has_window * footprint.window_blocks


def window_levels(
    sizes: SlidingGroups, positions: tuple[int, int, int], held: int
) -> np.ndarray:
    """Return [1 + last - end] int64: most superblocks of windows in a step and later.

    What windows leave behind comes back in the request's turn of a step, when the
    tokens ahead count as computed; with asynchronous scheduling that is a step later.
    So the first steps hold what longer ones have left, too.

    Args:
        positions: tokens computed before the step, `end` after it, and `last`; each
            later step computes one.
        held: superblocks of windows that the request holds before the step.
    """
    computed, end, last = positions
    after = np.arange(end, last + 1)  # tokens computed after each step
    found = sizes.held(after - 2, after)
    found[0] = sizes.most_blocks(end, max(end - computed, 1))
    late = sizes.late_steps + 1
    more = -(-after[:late] // sizes.block_size) - -(-computed // sizes.block_size)
    found[:late] = np.maximum(found[:late], held + sizes.count * more)
    before = sizes.held(computed, after[1 : late + 1], 0)
    found[1 : late + 1] = np.maximum(found[1 : late + 1], before)
    return found


@dataclass(frozen=True)
class Booking:
    """What one request is expected to hold from a step on.

    Args:
        start: number of the first step.
        levels: [S] int64, superblocks in each step from there.
        offset: position of the token that step s computes, less s; None while the
            request computes its prompt and the levels are bounds.
    """

    start: int
    levels: np.ndarray
    offset: int | None

    @property
    def end(self) -> int:
        """Number of the step behind the last one."""
        return self.start + len(self.levels)


@dataclass
class Forecast:
    """The sum of all bookings, step by step.

    Attributes:
        step: number of the step that is being scheduled.
    """

    step: int = 0
    bookings: dict[str, Booking] = field(default_factory=dict)
    # Entry s - _first is what is booked for step s.
    _first: int = 0
    _load: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def peak(self, levels: np.ndarray, leaving: Iterable[str] = ()) -> int:
        """Return the most that will be held if another request holds `levels`.

        Args:
            levels: [S] int64, superblocks from this step on.
            leaving: requests whose bookings do not count.
        """
        self._reach(self.step + len(levels))
        start = self.step - self._first
        load = self._load[start : start + len(levels)] + levels
        for booking in map(self.bookings.get, leaving):
            if booking is not None:
                coming = booking.levels[self.step - booking.start :][: len(load)]
                load[: len(coming)] -= coming
        return int(load.max())

    def most(self) -> int:
        """Return the most that is booked for a step from this one on."""
        return int(self._load[self.step - self._first :].max(initial=0))

    def book(self, request_id: str, levels: np.ndarray, offset: int | None) -> None:
        """Replace what is booked for a request, from this step on."""
        self.cancel(request_id)
        booking = Booking(self.step, levels, offset)
        self.bookings[request_id] = booking
        self._add(booking, 1)

    def cancel(self, request_id: str) -> None:
        """Forget what is booked for a request, if anything."""
        booking = self.bookings.pop(request_id, None)
        if booking is not None:
            self._add(booking, -1)

    def _add(self, booking: Booking, sign: int) -> None:
        first = max(booking.start, self.step)
        if first >= booking.end:
            return
        self._reach(booking.end)
        there = slice(first - self._first, booking.end - self._first)
        self._load[there] += sign * booking.levels[first - booking.start :]

    def _reach(self, end: int) -> None:
        """Make room for steps below `end`; those that have passed make way first."""
        if end - self._first <= len(self._load):
            return
        coming = self._load[self.step - self._first :]
        self._first = self.step
        self._load = np.zeros(max(2 * (end - self.step), 1024), np.int64)
        self._load[: len(coming)] = coming


@lru_cache(maxsize=1)  # the next request that waits asks the same in every step
def computed_levels(
    footprint: Footprint, positions: tuple[int, int, int], ahead: int
) -> np.ndarray:
    """Return [1 + last - end] int64: superblocks where a step gets to `end`, and on.

    Args:
        positions: tokens computed before the step, `end` after it, and `last`; each
            later step computes one.
        ahead: tokens by which what it computes may be ahead of this.
    """
    computed, end, last = positions
    assert end > computed, positions
    held = held_levels(footprint, computed, last)
    levels = held[end - computed - 1 :]
    levels[0] = max(levels[0], held[0])
    return most_ahead(levels, ahead)


def most_ahead(levels: np.ndarray, ahead: int) -> np.ndarray:
    """Return the most of each level and the `ahead` ones after it; the last goes on.

    >>> most_ahead(np.array([3, 1, 4, 1, 5, 2]), 2)
    array([4, 4, 5, 5, 5, 2])
    """
    width = 1
    while width <= ahead:
        shift = min(width, ahead + 1 - width)
        later = np.full_like(levels, levels[-1])
        later[: len(levels[shift:])] = levels[shift:]
        levels, width = np.maximum(levels, later), width + shift
    return levels
