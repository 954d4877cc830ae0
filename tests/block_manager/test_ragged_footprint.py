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
from vllm_kvpolicy.events import EventPlan
from vllm_kvpolicy.policies.allocators.hard import scale_to
from vllm_kvpolicy.protocol import CompactEvent, UsedBlocks
from vllm_kvpolicy.worker.batch import Batch, HeldPages
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.transfer import to_device_together

LAYERS, HEADS = 36, 8
NUM_HEADS = LAYERS * HEADS
RECENT, PROMPT = 32, 32768
CPU = torch.device("cpu")
BUDGETS = (1024, 2048, 4096)
BLOCK_SIZES = (16, 32)
# Tokens beyond a whole superblock: those of the last one are local.
OFFSETS = (0, 1, 7, 15, 16, 30, 31)
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
    slots = RequestTable(1, 1, block_size, CPU)
    pool = PagePool(torch.zeros(LAYERS, 2, HEADS, block_size, 2).unbind(), False)
    own = pool.own_pages(torch.zeros(1, 1, dtype=torch.int64)).flatten()
    room = FoldedTables(LAYERS, HEADS, 0, 0, CPU)
    tier = RaggedTier(slots, pool, HeadTables(1, 1, own, HEADS, CPU), room)
    held = HeldPages(
        pages=torch.zeros(1, NUM_HEADS, 1, dtype=torch.int64),
        num_pages=torch.full((1, NUM_HEADS), len(event.source_blocks)),
        num_local=torch.tensor([event.local_tokens(block_size)]),
        max_tokens=event.position,
    )
    policy: Any = SimpleNamespace(dynamic=dynamic)
    chosen = torch.arange(event.position) < keep[..., None]
    sent = to_device_together(tier.numbers([event], [0]), CPU)
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


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_fixed_total_is_met_page_by_page(
    budget: int, block_size: int, record_property
) -> None:
    outcomes = [serve(budget, block_size, offset) for offset in OFFSETS]
    used = [outcome.utilisation(block_size) for outcome in outcomes]
    record_property("superblocks", [outcome.held for outcome in outcomes])
    record_property("utilisation", [round(share, 4) for share in used])
    for outcome in outcomes:
        assert abs(outcome.held - -(-outcome.pages // NUM_HEADS)) <= 1, outcome
    assert min(used) >= MIN_UTILISATION, used


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_smaller_choice_holds_what_its_pages_fill(
    budget: int, block_size: int, share: float
) -> None:
    for offset in OFFSETS:
        outcome = serve(budget, block_size, offset, share)
        assert outcome.held == -(-outcome.pages // NUM_HEADS), outcome
        # Half a page per head is lost on average, and part of one superblock.
        lost = 1 - outcome.utilisation(block_size)
        assert lost < 2 * block_size / (share * budget - RECENT), outcome


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_equal_heads_would_need_the_longest_of_them(
    budget: int, block_size: int, record_property
) -> None:
    """Where page tables are shared by all heads, everybody holds the maximum."""
    outcome = serve(budget, block_size)
    equal = -(-outcome.longest // block_size)
    record_property("superblocks, equal", equal)
    record_property("superblocks, ragged", outcome.held)
    assert equal > 3 * outcome.held, (equal, outcome)
