"""Where survivors go: counts, order, repeatability and empty pools.

Of test policies, on plain integers.
"""

import random

import pytest

from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.policies.testing import exchanged, shuffled

OWNED = list(range(100, 120))


class Pool:
    """Hands out fresh numbers until it is empty and remembers what was asked."""

    def __init__(self, num_free: int) -> None:
        self.free = list(range(num_free))
        self.asked: list[int] = []

    def take(self, count: int) -> list[int]:
        self.asked.append(count)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def test_shuffled_keeps_own_blocks_out_of_order_and_takes_nothing():
    pool = Pool(5)
    blocks = shuffled(OWNED, 12, pool.take, seed=1)
    assert set(blocks) <= set(OWNED) and len(set(blocks)) == 12
    assert blocks != sorted(blocks)
    assert pool.asked == []


def test_exchanged_trades_half_for_free_blocks():
    pool = Pool(50)
    blocks = exchanged(OWNED, 12, pool.take, seed=1)
    fresh = [block for block in blocks if block < 100]
    assert len(set(blocks)) == 12 and len(fresh) == 6
    assert pool.asked == [6]
    assert blocks != sorted(blocks)


@pytest.mark.parametrize("place", [shuffled, exchanged])
def test_every_placement_returns_the_count_of_distinct_blocks(place):
    rng = random.Random(2)
    for _ in range(500):
        owned = rng.sample(range(1000, 9000), rng.randint(1, 40))
        count = rng.randint(0, len(owned))
        pool = Pool(rng.randint(0, 30))
        before = set(pool.free)
        blocks = place(owned, count, pool.take, seed=rng.randrange(2**40))
        assert len(blocks) == len(set(blocks)) == count
        taken = before - set(pool.free)
        assert taken <= set(blocks) <= set(owned) | taken, "a taken block is lost"


def test_seeds_differ_between_events_and_repeat():
    seeds = {event_seed(ordinal, p) for ordinal in range(50) for p in range(0, 5000, 7)}
    assert len(seeds) == 50 * len(range(0, 5000, 7))
    assert event_seed(3, 4096) == event_seed(3, 4096)
    assert 0 <= event_seed(2**20, 2**31) < 2**63
