"""How many requests a pool of superblocks bears at once, and what one of them holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, lcm

import numpy as np

from vllm_kvpolicy.block_manager.forecast import Forecast, held_levels
from vllm_kvpolicy.events import PHASE_BITS, EventPlan, Footprint, after_any_event

SAMPLED_PHASES = 32


@dataclass(frozen=True)
class Life:
    """What requests of one length hold from their prompts to the end.

    Args:
        footprint: of the request in phase 0.
        num_tokens: tokens that are computed; the last one of an answer is not.
        is_spread: requests have phases of their own.
        beside: superblocks of layers with a window or a state, at most and on the
            average while it answers.
    """

    footprint: Footprint
    num_tokens: int
    is_spread: bool = True
    beside: tuple[int, float] = 0, 0

    @classmethod
    def without_events(
        cls,
        prompt_tokens: int,
        num_tokens: int,
        block_size: int,
        beside: tuple[int, float] = (0, 0),
    ) -> "Life":
        """Return the life of a request that keeps all its tokens."""
        never = num_tokens + 1
        events = EventPlan(prompt_tokens, never, never, never)
        return cls(Footprint(events, 0, block_size), num_tokens, False, beside)

    @property
    def first(self) -> int:
        """Position from which the answer counts: past an event at the prompt's end."""
        return min(self.footprint.events.prompt_len + 1, self.num_tokens - 1)

    @cached_property
    def prompt_peak(self) -> int:
        """Most superblocks held while the prompt is computed."""
        return self.footprint.peak_blocks(self.first) + self.beside[0]

    @property
    def peak(self) -> int:
        """Most superblocks held at all."""
        return self.footprint.most_blocks(self.num_tokens) + self.beside[0]

    @property
    def mean(self) -> float:
        """Mean superblocks held while a token of the answer is computed."""
        own = np.mean([self.levels(phase) for phase in phases(SAMPLED_PHASES)])
        return float(own) - ceil(self.beside[1]) + self.beside[1]

    @property
    def after_event(self) -> int | None:
        """Most superblocks right after an event in the answer, wherever in a block."""
        events = self._in_phase((1 << PHASE_BITS) - 1).events
        if events.first_decode_event >= self.num_tokens:
            return None
        sizes = self.footprint.recent, 0, self.footprint.block_size
        return after_any_event(events.budget, *sizes) + self.beside[0]

    def levels(self, phase: int, settled: bool = False) -> np.ndarray:
        """Return superblocks while each token from `first` on is computed.

        Args:
            settled: stop where what requests of all phases hold begins to repeat.
        """
        events, last = self.footprint.events, self.num_tokens
        if settled:
            period = lcm(events.interval, self.footprint.block_size)
            last = min(last, events.first_decode_event + period + 1)
        held = held_levels(self._in_phase(phase), self.first, last)
        return held + ceil(self.beside[1])

    def _in_phase(self, phase: int) -> Footprint:
        events = replace(self.footprint.events, phase=phase * self.is_spread)
        return replace(self.footprint, events=events)


def phases(count: int) -> list[int]:
    """Return evenly spread phases, beginning with 0."""
    return [(index << PHASE_BITS) // count for index in range(count)]


def most_at_once(lives: Sequence[Life], num_usable: int) -> int:
    """Return how many requests a pool bears whose answers begin together.

    Requests take turns in having each of the lives, and phases are spread evenly among
    those of one life. One that ends before the longest is followed by one of its kind.
    The forecast, the sum of what all hold step by step, has to stay within the pool.
    Prompts are computed one after the other: each beside the most that the requests
    before it will hold.

    A number is found by bisection. Where events lie in their blocks can make one more
    request fit where one less does not; then that is tried, but not much farther.

    Args:
        lives: of the requests, each as often as any other.
        num_usable: superblocks of the pool without vLLM's null block.
    """
    known = [lru_cache(maxsize=4096)(life.levels) for life in lives]
    longest = max(life.num_tokens - life.first for life in lives)

    def fits(count: int) -> bool:
        forecast = Forecast()
        each = phases(max(-(-count // len(lives)), 1))
        for index in range(count):
            turn, which = divmod(index, len(lives))
            levels = known[which](each[turn], settled=len(lives) == 1)
            if len(lives) > 1:
                levels = np.resize(levels, longest)  # repeats them
            entering = np.maximum(levels, lives[which].prompt_peak)
            if forecast.beside(entering).max() > num_usable:
                return False
            forecast.book(str(index), levels, None)
        return True

    low, high = 0, num_usable + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(count for count in range(low, low + 4) if count == low or fits(count))
