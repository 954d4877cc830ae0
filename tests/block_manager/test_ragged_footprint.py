"""Ragged against equal heads at the same total budget, in superblocks.

The real allocator and the real block manager on synthetic head sizes: 36 layers of 8 KV
heads whose appetite falls by layer and head as in the profiles of Hard-KV's paper.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.pool_engine import Engine
from support.worker.tiers import make_tier
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.policies.allocators.hard import scale_to
from vllm_kvpolicy.protocol import CompactEvent, UsedBlocks
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.transfer import to_device_together

LAYERS, HEADS = 36, 8
NUM_HEADS = LAYERS * HEADS
RECENT, PROMPT = 32, 32768
CPU = torch.device("cpu")
MIN_UTILISATION = 0.95


@dataclass(frozen=True)
class Outcome:
    """One request after an event at its prompt's end.

    Args:
        held: superblocks of survivors that the manager says it holds.
        pages: pages that heads ask for, each rounded up.
        asked: tokens below the frontier that heads ask for.
        longest: tokens of the longest head among them.
    """

    held: int
    pages: int
    asked: int
    longest: int

    def utilisation(self, block_size: int) -> float:
        """Return tokens asked for over tokens held."""
        return self.asked / (self.held * NUM_HEADS * block_size)


def head_sizes(budget: int, fewest: int, mean: int) -> torch.Tensor:
    """Return [1, n] tokens per head that add up to n * `mean`."""
    layer = torch.arange(LAYERS, dtype=torch.float64)[:, None]
    head = torch.arange(HEADS, dtype=torch.float64)
    profile = (0.934**layer * 0.872**head).flatten()
    floors = torch.full((1, NUM_HEADS), fewest)
    caps = torch.full_like(floors, min(4 * budget, PROMPT))
    sizes = (profile * 4 * budget).long()[None].clamp(floors, caps)
    return scale_to(torch.tensor([NUM_HEADS * mean]), sizes, floors, caps)


def page_quota(
    event: CompactEvent, block_size: int, keep: torch.Tensor, dynamic: bool
) -> torch.Tensor:
    """Return [n] pages per head, by the worker's own tier."""
    pool = PagePool(torch.zeros(LAYERS, 2, HEADS, block_size, 2).unbind(), False)
    tier = make_tier(True, RequestTable(1, 1, block_size, CPU), pool)
    held = HeldPages(
        pages=torch.zeros(1, NUM_HEADS, 1, dtype=torch.int64),
        num_pages=torch.full((1, NUM_HEADS), len(event.source_blocks)),
        num_local=torch.tensor([event.local_tokens(block_size)]),
        max_tokens=event.position,
    )
    policy: Any = SimpleNamespace(dynamic=dynamic)
    chosen = torch.arange(event.position) < keep[..., None]
    tier.requests.take(event.request_id)
    sent = to_device_together(tier.numbers([event]), CPU)
    return tier.quota(Batch([event], policy, [0], sent, held), chosen)[0]


def serve(budget: int, block_size: int, offset: int = 0, share: float = 1.0) -> Outcome:
    """Run a request to the event at its prompt's end; `share` below 1 is dynamic."""
    engine = Engine(PROMPT // block_size + 4, block_size=block_size)
    prompt = PROMPT + offset
    plan = EventPlan(prompt, budget, interval=512, prefill_interval=2 * PROMPT)
    engine.add("a", plan, RECENT)
    (event,) = engine.advance("a", prompt + 1)
    local = event.local_tokens(block_size)
    sizes = head_sizes(budget, local + 1, int(budget * share))
    keep = sizes - local
    quota = page_quota(event, block_size, keep, share < 1)
    used = -(-int(quota.sum()) // NUM_HEADS)
    if share < 1:
        engine.manager.give_back_surplus(UsedBlocks("a", event.serial, used))
    row = engine.ids("a")
    frontier = event.frontier_blocks
    held = sum(block > 0 for block in row[:frontier])
    assert held == used == engine.planner.num_global_blocks
    num_blocks = engine.pool.num_gpu_blocks - 1
    assert engine.free == num_blocks - held - len(row[frontier:])
    return Outcome(
        held=held,
        pages=int((-(-keep // block_size)).sum()),
        asked=int(keep.sum()),
        longest=int(keep.max()),
    )


@pytest.mark.parametrize("share", [1.0, 0.25, 0.8])
@pytest.mark.parametrize(
    ("budget", "block_size", "offset"),
    [(1024, 16, 0), (1024, 32, 31), (2048, 16, 7), (4096, 32, 16)],
)
def test_a_request_holds_what_its_pages_fill(
    budget: int, block_size: int, offset: int, share: float
) -> None:
    """A fixed total is met page by page; a smaller choice gives the rest back."""
    outcome = serve(budget, block_size, offset, share)
    filled, used = -(-outcome.pages // NUM_HEADS), outcome.utilisation(block_size)
    if share < 1:
        assert outcome.held == filled, outcome
        # Half a page per head is lost on average, and part of one superblock.
        assert 1 - used < 2 * block_size / (share * budget - RECENT), outcome
    else:
        assert abs(outcome.held - filled) <= 1 and used >= MIN_UTILISATION, outcome
        # Where page tables are shared by all heads, everybody holds the maximum.
        assert -(-outcome.longest // block_size) > 3 * outcome.held, outcome
