"""To which level requests are cut, so that enough superblocks come back."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from vllm_kvpolicy.events import NO_STEP


@dataclass(frozen=True)
class Row:
    """A running request that may be cut.

    Args:
        position: of its event, and `latest`, the last one that it may have.
        held: tokens per KV head that it would hold there behind what is pinned.
        floor: K, fewest of these tokens to which it is cut.
        spacing: fewest tokens that an event drops.
        local: tokens behind the frontier there.
        whole: superblocks between what is pinned and the frontier, less those that
            others hold, too.
        shared: those.
        pinned: tokens in superblocks that no event touches.
        wait: tokens until its event.
        ends: it has its last token before others could be cut.
        is_called: the event is called for, with the budget `held`; it may be a
            superblock deeper (`spacing`), of those that it leaves (`whole`).
    """

    request_id: str
    priority: int
    position: int
    held: int
    floor: int
    spacing: int
    local: int
    whole: int
    shared: int = 0
    pinned: int = 0
    wait: int = 0
    latest: int = NO_STEP
    ends: bool = False
    is_called: bool = False

    @property
    def is_due(self) -> bool:
        """Whether the event comes in this step."""
        return self.is_called and not self.wait


def by_urgency(each: tuple[Row, int]) -> tuple[int, int]:
    """Return what sorts rows and their budgets: least urgent, most to drop first."""
    row, budget = each
    return -row.priority, budget - row.held


def water_fill(
    rows: list[Row], lacking: int, size: int
) -> list[tuple[Row, int]] | None:
    """Return who is cut, and to what, so that enough superblocks come back.

    Those of the least urgent class first; of a class all to the same level, the highest
    that suffices, and none below its floor.

    >>> row = Row("a", 0, 400, 400, 64, 8, 16, 24)
    >>> [(each.request_id, budget) for each, budget in water_fill([row], 5, 16)]
    [('a', 320)]

    Args:
        lacking: superblocks that have to come back.
        size: N, tokens per superblock.

    Returns:
        None where even the floors give back too little.
    """
    chosen: list[tuple[Row, int]] = []
    for priority in sorted({row.priority for row in rows}, reverse=True):
        of_class = [row for row in rows if row.priority == priority]
        levels = Levels(of_class, size)
        level = levels.highest(lacking)
        chosen += levels.cut_to(level or 0)
        if level is not None:
            return chosen
        lacking -= levels.gain(0)
    return None


class Levels:
    """What rows give back when all are cut to one level.

    Args:
        size: N, tokens per superblock.
    """

    def __init__(self, rows: list[Row], size: int) -> None:
        self.rows, self.size = rows, size
        columns = [(r.held, r.floor, r.spacing, r.local, r.whole) for r in rows]
        self.held, self.floor, self.spacing, self.local, self.whole = (
            np.array(columns, np.int64).reshape(-1, 5).T
        )

    def gains(self, level: int | np.ndarray) -> np.ndarray:
        """Return [R] superblocks that an event gives back; 0 where it is not worth it.

        Args:
            level: tokens; one for all rows, or [R].
        """
        budget = np.maximum(self.floor, level)
        kept = -(-(budget - self.local) // self.size)
        is_worth = self.held - budget >= self.spacing
        return np.where(is_worth, np.maximum(self.whole - kept, 0), 0)

    def gain(self, level: int) -> int:
        """Return the superblocks that come back at a level."""
        return int(self.gains(level).sum())

    def highest(self, lacking: int) -> int | None:
        """Return the highest level at which enough comes back; None for none."""
        if lacking <= 0:
            return int(self.held.max())
        if self.gain(0) < lacking:
            return None
        higher = range(1, int(self.held.max()))
        return bisect_left(higher, True, key=lambda level: self.gain(level) < lacking)

    def cut_to(self, level: int) -> list[tuple[Row, int]]:
        """Return those who are cut at a level, and to what."""
        gains, budget = self.gains(level), np.maximum(self.floor, level)
        return [(self.rows[i], int(budget[i])) for i in np.flatnonzero(gains)]
