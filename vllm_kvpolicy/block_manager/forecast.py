"""Foresees the superblocks that running requests will hold in every coming step.

A running request computes one token a step, its events come at known positions, and it
ends after a known number of tokens. So what it holds is a known saw-tooth, and what all
of them hold together is the sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.sizes import OtherGroups

HORIZON = 8192  # steps; what a request holds later is booked when they have passed
PRICE = 0.3  # tokens of an answer that a token computed again in a prompt is worth


class Course(NamedTuple):
    """The events of a request that are known, and what it holds between them.

    Args:
        events: positions to come, ascending, one more than there are: the last one is
            not reached.
        frontiers: F / N before each of them.
        kept: superblocks of survivors before each of them.
    """

    events: tuple[int, ...]
    frontiers: tuple[int, ...]
    kept: tuple[int, ...]


def held_levels(
    footprint: Footprint, first: int, last: int, course: Course | None = None
) -> np.ndarray:
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
        course: of events that are called for; None where their positions are fixed.
    """
    if course is None:
        events = _events(footprint.events, last)
        frontiers = np.insert(footprint.frontier_blocks(events), 0, 0)
        kept = np.insert(footprint.global_blocks(events), 0, 0)
    else:
        events, frontiers, kept = map(np.array, course)

    def held_at(token: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Return what is held once a token is computed, after so many events."""
        has_window = token >= events[number] - footprint.window_tokens
        own = kept[number] + footprint.blocks(token + 1) - frontiers[number]
        return own + has_window * footprint.window_blocks

    token = np.arange(first, last)
    number = np.searchsorted(events, token, side="right")  # of events so far
    held = held_at(token, number)
    at_event = events[(events >= first) & (events < last)] - first
    before = held_at(token[at_event] - 1, number[at_event] - 1)
    held[at_event] = np.maximum(held[at_event], before)
    return held


def course_peak(footprint: Footprint, course: Course, last: int) -> int:
    """Return the most superblocks held on the way to `last` tokens."""
    peak = 0
    for event, frontier, kept in zip(*course, strict=True):
        end = min(event, last)
        window = footprint.window_blocks if end > event - footprint.window_tokens else 0
        peak = max(peak, kept + footprint.blocks(end) - frontier + window)
        if event >= last:
            break
    return peak


def _events(plan: EventPlan, last: int) -> Any:
    """Return the event positions up to the first one at or after `last`."""
    found, position = [], plan.next_event(0)
    while position <= plan.prompt_len and position < last:
        found.append(position)
        position = plan.next_event(position + 1)
    steps = np.arange(max(-(-(last - position) // plan.interval), 0) + 1)
    return np.concatenate([found, position + steps * plan.interval]).astype(np.int64)


def window_levels(
    sizes: OtherGroups, positions: tuple[int, int, int], held: int
) -> np.ndarray:
    """Return [1 + last - end] int64: most superblocks of windows in a step and later.

    Or of states. What windows leave behind comes back in the request's turn of a step,
    when the tokens ahead count as computed; with asynchronous scheduling that is a step
    later. So the first steps hold what longer ones have left, too.

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
    first = np.minimum(held + sizes.count * more, sizes.most_blocks(last))
    found[:late] = np.maximum(found[:late], first)
    before = sizes.held(computed, after[1 : late + 1], 0)
    found[1 : late + 1] = np.maximum(found[1 : late + 1], before)
    return found


@dataclass(frozen=True)
class Booking:
    """What one request is expected to hold from a step on.

    Args:
        start: number of the first step.
        levels: [S], superblocks in each step from there.
        offset: position of the token that step s computes, less s; None while the
            request computes its prompt and the levels are bounds.
    """

    start: int
    levels: np.ndarray
    offset: int | None

    @cached_property
    def end(self) -> int:
        """Number of the step behind the last one."""
        return self.start + len(self.levels)


@dataclass
class Forecast:
    """The sum of all bookings, step by step.

    Args:
        dtype: of what is booked; superblocks on the average are no whole numbers.

    Attributes:
        step: number of the step that is being scheduled.
    """

    step: int = 0
    dtype: type[np.number] = np.int64
    bookings: dict[str, Booking] = field(default_factory=dict)
    # Entry s - _first is what is booked for step s.
    _first: int = 0
    _load: np.ndarray = field(init=False)
    # The most that is booked, and the last step with it; none where that has changed.
    _peak: tuple[float, int] = (0, -1)

    def __post_init__(self) -> None:
        self._load = np.zeros(0, self.dtype)

    def beside(self, levels: np.ndarray, leaving: Iterable[str] = ()) -> np.ndarray:
        """Return [S]: what will be held if another request holds `levels`.

        Args:
            levels: [S], superblocks from this step on.
            leaving: requests whose bookings do not count.
        """
        self._reach(self.step + len(levels))
        start = self.step - self._first
        load = self._load[start : start + len(levels)] + levels
        for booking in map(self.bookings.get, leaving):
            if booking is not None:
                coming = booking.levels[self.step - booking.start :][: len(load)]
                load[: len(coming)] -= coming
        return load

    def ahead(self, last: int) -> np.ndarray:
        """Return [last + 1], or less: what is booked for the steps from here."""
        start = self.step - self._first
        return self._load[start : start + last + 1]

    def most(self) -> float:
        """Return the most that is booked for a step from this one on.

        The whole array is searched once per change: NumPy lets other threads run
        meanwhile, and to get its turn back costs the scheduler 100 times as long.
        """
        if self._peak[1] < self.step:
            coming = self._load[self.step - self._first :]
            if not len(coming):
                return 0
            behind = int(coming[::-1].argmax())
            end = self._first + len(self._load)
            self._peak = max(coming[-1 - behind], 0), end - 1 - behind
        return self._peak[0]

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
        self._peak = 0, -1
        there = slice(first - self._first, booking.end - self._first)
        self._load[there] += sign * booking.levels[first - booking.start :]

    def _reach(self, end: int) -> None:
        """Make room for steps below `end`; those that have passed make way first."""
        if end - self._first <= len(self._load):
            return
        coming = self._load[self.step - self._first :]
        self._first = self.step
        self._load = np.zeros(max(2 * (end - self.step), 1024), self.dtype)
        self._load[: len(coming)] = coming


def is_worth(held: np.ndarray, room: float, known: int) -> bool:
    """Return whether a request that enters fits, or gets far enough to be worth it.

    When the pool is full vLLM preempts, and what it has by then is computed again.

    >>> held = np.array([8, 9, 9, 10, 11])
    >>> is_worth(held, room=10, known=9), is_worth(held, room=10, known=10)
    (True, False)

    Args:
        held: [S], superblocks of all, from this step on.
        room: superblocks of the pool.
        known: its tokens when it enters, less those that others keep for it.
    """
    is_short = held > room + 1e-6  # what is added and taken off leaves a rest
    steps = int(is_short.argmax())
    return not is_short.any() or steps >= PRICE * (known + steps)


@lru_cache(maxsize=1)  # the next request that waits asks the same in every step
def computed_levels(
    footprint: Footprint,
    positions: tuple[int, int, int],
    ahead: int,
    course: Course | None = None,
) -> np.ndarray:
    """Return [1 + last - end] int64: superblocks where a step gets to `end`, and on.

    Args:
        positions: tokens computed before the step, `end` after it, and `last`; each
            later step computes one.
        ahead: tokens by which what it computes may be ahead of this.
        course: of events that are called for; None where their positions are fixed.
    """
    computed, end, last = positions
    assert end > computed, positions
    held = held_levels(footprint, computed, last, course)
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
