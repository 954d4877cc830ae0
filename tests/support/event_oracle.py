"""The event rule and the block count, one token at a time.

Written from the words of the design, (i) to (iii), and from the layout of the two
pools; shares nothing with the closed forms that it checks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One request: prompt length P, budget K, interval I, prefill interval, R, N.

    Its phase is a fraction of 2**32; its window is W, queries that an event reads.
    """

    prompt_len: int
    budget: int
    interval: int
    prefill_interval: int
    recent: int = 0
    block_size: int = 16
    phase: int = 0
    window: int = 0


def walk_events(case: Case, last: int) -> list[int]:
    """Return the event positions <= `last`, counting the tokens that are held."""
    moved = first_moved(case) if case.phase else None
    positions = []
    held = 0
    for position in range(1, last + 1):
        held += 1
        if position < case.prompt_len:
            on_grid = position % case.prefill_interval == 0
            has_event = on_grid and held > case.budget
        elif moved is not None and case.prompt_len < position <= moved:
            has_event = position == moved
        else:
            # The prompt's end, and every position after it.
            has_event = held >= case.budget + case.interval
        if has_event:
            positions.append(position)
            held = case.budget
    return positions


def first_moved(case: Case) -> int:
    """Return the first event past the prompt, by listing where it may be, latest first.

    It may be at any position past the prompt at which more than the budget is held, up
    to that of phase 0; at least a window of queries has passed since the last event.
    """
    last = case.prompt_len + case.budget + case.interval
    events = walk_events(replace(case, phase=0), last)
    before = max((p for p in events if p <= case.prompt_len), default=case.budget)
    latest = min(p for p in events if p > case.prompt_len)
    allowed = [
        position
        for position in range(latest, case.prompt_len, -1)
        if position > before and position - before >= case.window
    ]
    return allowed[case.phase * len(allowed) // 2**32]


class Holder:
    """A request that holds superblocks, by number, and gives them back at events."""

    def __init__(self, case: Case, keeps_all: bool = False, lent: int = 0) -> None:
        self.case = case
        self.keeps_all = keeps_all
        self.lent = lent  # superblocks of a query window
        self.has_window = False
        self.num_global = 0
        self.local: list[int] = []
        self.frontier = 0
        self.peak = 0

    def event(self, position: int) -> None:
        """Move the frontier up; survivors need room for K less the local tokens."""
        size = self.case.block_size
        frontier = (position - self.case.recent) // size * size
        owned = self.num_global
        owned += sum(block * size < frontier for block in self.local)
        self.local = [block for block in self.local if block * size >= frontier]
        wanted = self.case.budget - (position - frontier)
        needed = owned if self.keeps_all else 0
        while needed * size < wanted and not self.keeps_all:
            needed += 1
        assert needed <= owned, "an event would need more than it has"
        self.num_global, self.frontier = needed, frontier
        self.has_window = False

    def compute(self, start: int, end: int, window: range = range(0)) -> None:
        """Allocate for the tokens start..end-1 of one step; `window` is what is read.

        The superblocks of queries are taken with the first that is.
        """
        for position in range(start, end):
            self.has_window |= position in window
            block = position // self.case.block_size
            if block not in self.local[-1:]:
                self.local.append(block)
        held = self.num_global + len(self.local) + self.lent * self.has_window
        self.peak = max(self.peak, held)


def walk_peak(
    case: Case,
    num_tokens: int,
    chunks: Iterable[int],
    keeps_all: bool = False,
    lent: int = 0,
) -> int:
    """Return the most superblocks held on the way to `num_tokens`.

    Args:
        num_tokens: tokens computed at the end.
        chunks: sizes of the steps; each is cut at the next event.
        lent: superblocks of the query window.
    """
    width = case.window
    events = walk_events(case, num_tokens + width)
    pending = set(events)
    holder = Holder(case, keeps_all, lent)
    position = 0
    for chunk in chunks:
        if position >= num_tokens:
            break
        if position in pending:
            holder.event(position)
        following = next((p for p in events if p > position), num_tokens + width)
        end = min(position + chunk, following, num_tokens)
        holder.compute(position, end, range(following - width, following))
        position = end
    assert position >= num_tokens, "not enough chunks"
    return holder.peak
