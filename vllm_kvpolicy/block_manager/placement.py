"""Chooses the superblocks that stay with a request after an event."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Block = TypeVar("Block")


class Placement(Protocol):
    """Chooses destination blocks among a request's own blocks and free ones."""

    def __call__(
        self,
        owned: Sequence[Block],
        count: int,
        take: Callable[[int], list[Block]],
        seed: int,
    ) -> list[Block]:
        """Return `count` destination blocks in time order.

        Args:
            owned: blocks below the frontier, in time order.
            count: blocks that the survivors need, at most `len(owned)`.
            take: takes up to n free blocks from the pool; may return fewer.
            seed: reproducible per request and event.
        """
        ...


def in_place(
    owned: Sequence[Block],
    count: int,
    take: Callable[[int], list[Block]],
    seed: int,
) -> list[Block]:
    """Keep the oldest blocks: survivors move towards the front, nothing is taken."""
    return list(owned[:count])


def shuffled(
    owned: Sequence[Block],
    count: int,
    take: Callable[[int], list[Block]],
    seed: int,
) -> list[Block]:
    """Keep a random choice of the request's own blocks in random order (test only)."""
    return random.Random(seed).sample(list(owned), count)


def exchanged(
    owned: Sequence[Block],
    count: int,
    take: Callable[[int], list[Block]],
    seed: int,
) -> list[Block]:
    """Trade half of the blocks for free ones and shuffle the rest (test only).

    With no free block in the pool this is `shuffled`.
    """
    rng = random.Random(seed)
    fresh = take(count // 2)
    mine = rng.sample(list(owned), count - len(fresh))
    blocks = fresh + mine
    rng.shuffle(blocks)
    return blocks


PLACEMENTS: dict[str, Placement] = {
    "in_place": in_place,
    "shuffled": shuffled,
    "exchanged": exchanged,
}
