"""When events happen and how much a request holds between them: pure integers.

The one source for scheduler, window capture, entry of requests, start-up line, oracles.

Words: p position (tokens computed before the step), K budget, I interval, R recent,
N tokens per superblock, F frontier. Lengths are in tokens unless a name says blocks.
A phase, 0 to 2**32 - 1, says how much earlier than they could be a request's events in
decoding come, so that requests which start together do not all wait for one step.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

NO_STEP = 2**62  # a prefill interval longer than any prompt: no event inside prompts
PHASE_BITS = 32
LAST_PHASE = 2**PHASE_BITS - 1  # the earliest events


def request_phase(prompt_token_ids: Sequence[int], seed: int | None = None) -> int:
    """Return the phase of a request: a function of what it asks, evenly spread.

    >>> request_phase([1, 2, 3]), request_phase([1, 2, 4]), request_phase([1, 2, 3], 7)
    (3676573847, 2616465062, 1442807477)

    Args:
        seed: of its sampling, so that samples of one prompt have phases of their own.
    """
    ids = struct.pack(f"<{len(prompt_token_ids)}q", *prompt_token_ids)
    named = ids if seed is None else ids + str(seed).encode()
    return int.from_bytes(blake2b(named, digest_size=PHASE_BITS // 8).digest())


@dataclass(frozen=True)
class EventPlan:
    """The positions of a request's events, ascending, without end.

    (i) Inside the prompt: multiples of `prefill_interval` at which more than `budget`
    tokens are held. (ii) The prompt's end, if at least `budget + interval` are held
    there. (iii) From then on the first position at which `budget + interval` are held,
    then every `interval`. An event at p runs before the token at p is computed.

    The phase moves the positions of (iii) to earlier ones, all by as much: the first of
    them is in the phase's place between the first position past the prompt at which
    more than `budget` tokens are held, and the queries since the last event fill a
    window, and the position named above, which is that of phase 0.

    Example: K = 64, I = 32. A prompt of 100 ends in an event, because 96 or more tokens
    are held there; one of 90 does not, so the first event is at 96.

    >>> [EventPlan(length, 64, 32, 4096).next_event(0) for length in (100, 90)]
    [100, 96]
    >>> phases = 2**31, 2**32 - 1
    >>> [EventPlan(90, 64, 32, 4096, phase).next_event(0) for phase in phases]
    [93, 91]
    >>> EventPlan(9000, 2048, 512, 4096).positions_up_to(9600)
    [4096, 8192, 9000, 9512]
    >>> EventPlan(9000, 2048, 512, 4096, phase=2**30).positions_up_to(9600)
    [4096, 8192, 9000, 9384]

    Args:
        prompt_len: tokens in the prompt, >= 1.
        budget: K, tokens a KV head may attend right after an event.
        interval: I, tokens between events.
        prefill_interval: tokens between events inside the prompt; NO_STEP for none.
        window_tokens: W <= I, newest queries that an event reads; 0 for none.
    """

    prompt_len: int
    budget: int
    interval: int
    prefill_interval: int
    phase: int = 0
    window_tokens: int = 0

    def _decode_start(self) -> tuple[int, bool]:
        """Return where decode events count from and whether an event ends the prompt.

        Tokens held at a position x past the prompt, before the next event, are
        `budget + x - origin`; so decode events are I, 2I... after the origin in phase
        0, and none is at the origin or before.
        """
        last_inside = (self.prompt_len - 1) // self.prefill_interval
        last_inside *= self.prefill_interval
        origin = last_inside if last_inside > self.budget else self.budget
        ends_in_event = self.prompt_len - origin >= self.interval
        return (self.prompt_len if ends_in_event else origin), ends_in_event

    @property
    def earliest_decode_event(self) -> int:
        """Position of the first decode event in the last phase."""
        origin, _ = self._decode_start()
        return max(self.prompt_len + 1, origin + max(self.window_tokens, 1))

    @cached_property
    def first_decode_event(self) -> int:
        """Position of the first event past the prompt's end; every I, one follows."""
        latest = self._decode_start()[0] + self.interval
        span = latest - self.earliest_decode_event + 1
        return latest - (self.phase * span >> PHASE_BITS)

    def next_inside(self, position: int) -> int:
        """Return the first event position >= `position` of an endless prompt."""
        step = self.prefill_interval
        return max(-(-position // step), self.budget // step + 1) * step

    def next_event(self, position: int) -> int:
        inside = self.next_inside(position)
        if inside < self.prompt_len:
            return inside
        _, ends_in_event = self._decode_start()
        if ends_in_event and position <= self.prompt_len:
            return self.prompt_len
        first = self.first_decode_event
        events_since = max(-(-(position - first) // self.interval), 0)
        return first + events_since * self.interval

    def positions_up_to(self, num_tokens: int) -> list[int]:
        """Return the event positions below `num_tokens`, for oracles and reports."""
        found = [self.next_event(0)]
        while found[-1] < num_tokens:
            found.append(self.next_event(found[-1] + 1))
        return found[:-1]


@dataclass(frozen=True)
class Footprint:
    """How many superblocks a request holds: events plus block geometry.

    Example: K = 64, I = 32, R = 8, N = 16 and a prompt of 100 tokens. The event at 100
    moves the frontier to superblock (100 - 8) // 16 = 5; 20 tokens are local, so that
    44 survivors fill 3 superblocks. The prompt itself takes 7, which is the peak.

    >>> footprint = Footprint(EventPlan(100, 64, 32, 4096), recent=8, block_size=16)
    >>> footprint.frontier_blocks(100), footprint.global_blocks(100)
    (5, 3)
    >>> footprint.peak_blocks(200)
    7

    Args:
        recent: R, newest tokens that are always kept.
        block_size: N, tokens per superblock.
        keeps_all: events may keep everything, as without a budget.
        window_blocks: superblocks that are borrowed for the queries that an event
            reads, from the step that computes the first of them to the event.
        pinned: first superblocks, which no event touches; the budget counts them, too.
        ahead: tokens behind the computed ones that have superblocks, too, for drafts.
        longest: most tokens of a request, behind which none has.
    """

    events: EventPlan
    recent: int
    block_size: int
    keeps_all: bool = False
    window_blocks: int = 0
    pinned: int = 0
    ahead: int = 0
    longest: int = NO_STEP

    @cached_property
    def window_tokens(self) -> int:
        """W, newest queries that an event reads; 0 for none."""
        return self.events.window_tokens

    def blocks(self, num_tokens: Any) -> Any:
        """Return the superblocks of so many computed tokens; integers or an array."""
        beyond = num_tokens + self.ahead - self.longest
        reach = num_tokens + self.ahead - beyond * (beyond > 0)
        return -(-reach // self.block_size)

    def frontier_blocks(self, position: int) -> int:
        """Return F / N for an event at `position`; tokens at and above F are local."""
        return (position - self.recent) // self.block_size

    def global_blocks(self, position: int, budget: int | None = None) -> int:
        """Return the superblocks before the frontier: pinned ones and survivors'.

        Args:
            budget: in tokens, what is pinned included; None for the plan's.
        """
        budget = self.events.budget if budget is None else budget
        frontier_blocks = self.frontier_blocks(position)
        if self.keeps_all:
            return frontier_blocks
        local = position - frontier_blocks * self.block_size
        return -(-(budget - local) // self.block_size)

    def peak_blocks(self, num_tokens: int, num_shared: int = 0) -> int:
        """Return the most superblocks held on the way to `num_tokens` tokens.

        Exact for every schedule, because steps are clipped at event positions and an
        event frees before its request allocates. Decode events repeat with a period of
        at most N events, so no more than one period is looked at.

        Args:
            num_shared: superblocks of a cached prefix that other requests hold too.
                They cost nothing until the first event, which takes superblocks of its
                own for what it keeps of them behind the pinned ones.
        """
        peak, held, frontier = 0, -num_shared, 0
        period = self.block_size * self.events.interval
        settled = self.events.first_decode_event + period
        last = min(num_tokens, settled) if not self.keeps_all else num_tokens
        position = self.events.next_event(0)
        while position < last:
            before = held + self.blocks(position) - frontier
            peak = max(peak, before + self.window_blocks)
            frontier = self.frontier_blocks(position)
            held = self.global_blocks(position) - min(num_shared, self.pinned)
            position = self.events.next_event(position + 1)
        end = min(num_tokens, position)
        window = self.window_blocks if end > position - self.window_tokens else 0
        return max(peak, held + self.blocks(end) - frontier + window)

    def most_blocks(self, num_tokens: int) -> int:
        """Return a bound on `peak_blocks` in any phase: no request holds more.

        At most one too high without a query window, which may be open at any time. In
        phase 0 the first event in decoding is latest; but where events lie in their
        blocks differs from phase to phase, and may cost a superblock more.
        """
        latest = replace(self.events, phase=0)
        earliest = replace(self.events, phase=LAST_PHASE)
        peak = replace(self, events=latest, window_blocks=0).peak_blocks(num_tokens)
        stretch = min(latest.interval, num_tokens - latest.earliest_decode_event)
        if not self.keeps_all and stretch > 0:
            sizes = self.recent, stretch + self.ahead, self.block_size
            spread = after_any_event(latest.budget, *sizes)
            peak = max(peak, min(spread, self.blocks(num_tokens)))
        has_window = num_tokens > earliest.next_event(0) - self.window_tokens
        return peak + self.window_blocks * has_window

    def worst_blocks(self, longest: int) -> int:
        """Return the superblocks that any request of up to `longest` tokens may hold.

        The maximum of `peak_blocks` over all prompt lengths and phases without pins, at
        most one block too high, rarely more with a query window, and enough for
        requests that ask for smaller numbers. The peak is reached before the first
        event, or at the end of a stretch after an event that left x local tokens, x
        from R to R + N - 1.
        """
        events, size = self.events, self.block_size
        first_inside = events.next_inside(0)
        first = max(first_inside, events.budget + events.interval)
        whole = -(-longest // size)
        window = self.window_blocks if longest > events.budget else 0
        if first >= longest:
            return whole + window
        # Events inside a prompt lie on whole blocks; the others lie anywhere.
        local = -(-self.recent // size) * size
        stretch = min(events.prefill_interval, longest - first_inside) + self.ahead
        inside = after_event(events.budget, local, stretch, size)
        stretch = events.interval + self.ahead
        decode = after_any_event(events.budget, self.recent, stretch, size)
        first_blocks = -(-(first + self.ahead) // size)
        return min(whole, max(first_blocks, inside, decode)) + window


def after_event(budget: int, local: int, stretch: int, block_size: int) -> int:
    """Return the superblocks held a stretch of tokens after an event left `local`."""
    return -(-(budget - local) // block_size) + -(-(local + stretch) // block_size)


def after_any_event(budget: int, recent: int, stretch: int, block_size: int) -> int:
    """Return the same where the event may lie anywhere in its superblock."""
    return max(
        after_event(budget, local, stretch, block_size)
        for local in range(recent, recent + block_size)
    )


def event_seed(ordinal: int, position: int) -> int:
    """Return a seed that repeats when the request is computed again."""
    return ordinal << 32 | position
