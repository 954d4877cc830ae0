"""Head pages of the simulation: where heads keep their tokens and which ones.

Owns the arithmetic of page ids and slots, what a request asked for, what it holds, and
the draw of page lists and survivors at an event.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvpolicy.events import EventPlan, Footprint

NUM_HEADS = 4  # 2 layers x 2 KV heads, each with survivors of its own
STRIDE = 2**20
EMPTY, WRONG = -1, -2  # no token; a rejected one at position 0
NEVER = 2**62
Lists = list[np.ndarray]  # one array per head


class SimulationFailure(AssertionError):
    """The scheduler, its messages and the storage do not agree."""


def check(condition: Any, *context: Any) -> None:
    """Raise SimulationFailure with the context unless the condition holds."""
    if not condition:
        raise SimulationFailure(" ".join(str(item) for item in context))


@dataclass(frozen=True)
class Asked:
    """What a request asked for.

    Args:
        prompt_len: tokens of its prompt.
        plan: its events; None where it wants the full KV cache.
        recent, sinks: tokens that are always kept.
        pinned: superblocks of them that no event may touch.
        window: queries that the policy reads.
        window_blocks: superblocks that they take.
        keeps_all: there is no budget; unless dynamic, events permute and drop nothing.
        is_ragged: heads hold different numbers of pages, anywhere in the superblocks.
        is_dynamic: they need not fill the destinations.
        is_called: events come when the scheduler calls for them, at any position, and
            the budget of the plan is the least that one leaves.
        codes: of each position, which say what its keys and values depend on; None
            where every incarnation has codes of its own.
    """

    prompt_len: int
    plan: EventPlan | None = None
    recent: int = 0
    sinks: int = 0
    pinned: int = 0
    policy: str = "none"
    window: int = 0
    window_blocks: int = 0
    keeps_all: bool = False
    is_ragged: bool = False
    is_dynamic: bool = False
    is_called: bool = False
    codes: np.ndarray | None = None

    def footprint(self, block_size: int) -> Footprint:
        """Return the superblocks that the request may hold."""
        assert self.plan is not None
        sizes = self.recent, block_size, self.keeps_all, self.window_blocks
        return Footprint(self.plan, *sizes, self.pinned)


def no_lists() -> Lists:
    """Return empty lists for all heads."""
    return [np.empty(0, np.int64) for _ in range(NUM_HEADS)]


@dataclass
class Incarnation:
    """A request from its first token to its end or preemption.

    Args:
        number: of this incarnation among all of the worker's.
        row: vLLM's block table row.
        pages: page ids of each head's global pool.
        survivors: positions in each head's global pool, in that order.
        dest_blocks: superblocks that the last event was given.
        num_used: leading ones of them that hold pages.
        window: superblocks that hold its newest queries.
        rejected: position of the step's first draft that is rejected.
    """

    asked: Asked
    number: int
    row: np.ndarray
    resumed: bool = False
    row_length: int = 0
    computed: int = 0
    frontier_blocks: int = 0
    pages: Lists = field(default_factory=no_lists)
    survivors: Lists = field(default_factory=no_lists)
    dest_blocks: tuple[int, ...] = ()
    num_used: int = 0
    window: tuple[int, ...] = ()
    positions: list[int] = field(default_factory=list)
    rejected: int = NEVER

    def codes(self, positions: np.ndarray) -> np.ndarray:
        """Return the codes of the tokens at some positions; of drafts as they are."""
        codes = self.number * STRIDE + positions
        if self.asked.codes is not None:
            codes = self.asked.codes[positions]
        return np.where(positions < self.rejected, codes, WRONG - positions)

    def extend(self, block_ids: Iterable[int]) -> None:
        """Append superblocks to the row, as vLLM's V1 runner does."""
        for block_id in block_ids:
            self.row[self.row_length] = block_id
            self.row_length += 1

    def held(self, local: np.ndarray) -> Lists:
        """Return the positions that each head holds, given the local ones."""
        return [np.concatenate([kept, local]) for kept in self.survivors]

    @property
    def pins(self) -> np.ndarray:
        """Superblocks that an event has left alone."""
        return self.row[: self.asked.pinned if self.positions else 0]


def own_pages(block_ids: Any) -> np.ndarray:
    """Return [heads, blocks] stock page ids of superblocks."""
    blocks = np.asarray(block_ids, dtype=np.int64)
    return blocks * NUM_HEADS + np.arange(NUM_HEADS)[:, None]


def slots_of(pages: Any, block_size: int) -> np.ndarray:
    """Return [..., pages * N] storage slots of page ids [..., pages]."""
    slots = np.asarray(pages, dtype=np.int64)[..., None] * block_size
    slots = slots + np.arange(block_size)
    return slots.reshape(*slots.shape[:-2], -1)


def draw_quota(
    asked: Asked,
    held: Sequence[int],
    num_dest: int,
    block_size: int,
    rng: np.random.Generator,
) -> list[int]:
    """Return pages per head after an event, sinks covered, one page at least.

    Args:
        held: pages of each head before.
        num_dest: superblocks to fill.
        block_size: N.
    """
    if not asked.is_ragged:
        return [num_dest] * NUM_HEADS
    sinks = max(-(-asked.sinks // block_size) - asked.pinned, 0)
    quota = [min(sinks, pages) for pages in held]
    total = min(num_dest * NUM_HEADS, sum(held))
    if asked.is_dynamic:
        total = int(rng.integers(max(sum(quota), 1), total + 1))
    weights = rng.random(NUM_HEADS) ** 3
    while sum(quota) < total:
        is_open = [own < most for own, most in zip(quota, held, strict=True)]
        share = weights * is_open + 1e-9 * np.array(is_open)
        quota[int(rng.choice(NUM_HEADS, p=share / share.sum()))] += 1
    return quota


def draw_pages(
    asked: Asked, dest_blocks: Sequence[int], quota: Sequence[int], rng: Any
) -> Lists:
    """Return page lists: stock pages, or any pages of the first superblocks."""
    if not asked.is_ragged:
        return list(own_pages(dest_blocks))
    num_used = -(-sum(quota) // NUM_HEADS)
    arena = rng.permuted(own_pages(dest_blocks[:num_used]).ravel())
    return np.split(arena[: sum(quota)], np.cumsum(quota)[:-1])


def draw_survivors(
    asked: Asked, held: Lists, quota: Sequence[int], block_size: int, rng: Any
) -> Lists:
    """Return survivors of each head: sinks, and others at random in time order."""
    if asked.keeps_all and not asked.is_dynamic:
        return [rng.permuted(tokens) for tokens in held]
    kept = []
    for tokens, pages in zip(held, quota, strict=True):
        count = pages * block_size
        lottery = rng.random(len(tokens))
        lottery[tokens < asked.sinks] = 2.0
        order = np.sort(np.argsort(-lottery, kind="stable")[:count])
        kept.append(tokens[order])
    return kept
