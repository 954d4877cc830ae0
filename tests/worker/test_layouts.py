"""Layouts: what is held, how many pages each head gets and which, against lists."""

from dataclasses import replace

import pytest
import torch

from support.worker.layout_world import KINDS, NUM_HEADS, SIZE, LayoutWorld
from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import HeldPages

SEEDS = range(12)
ROUNDS = 4
RAGGED = KINDS[1:]


def split(lists: PageLists, row: int) -> list[list[int]]:
    """Return the pages of each head of one event."""
    first, pages = lists.first[row].tolist(), lists.pages[row].tolist()
    return [pages[a:b] for a, b in zip(first, first[1:], strict=False)]


def run_round(
    world: LayoutWorld, fills: bool
) -> tuple[list[CompactEvent], HeldPages, list[list[int]], PageLists, list]:
    """Run one round of events with random quotas.

    Returns:
        Events, what was held, quotas, new lists, and each event's lists before.
    """
    events = world.events()
    batch = world.open(events)
    before = [world.before(event) for event in events]
    quota = [world.random_quota(event, fills) for event in events]
    lists = world.tier.assign(batch, torch.tensor(quota))
    world.tier.commit(batch, lists)
    world.table.update(batch.rows, events, batch.sent)
    for row, event in enumerate(events):
        world.requests[event.request_id].lists = split(lists, row)
    return events, batch.held, quota, lists, before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_held_is_what_the_lists_say(kind: str, seed: int) -> None:
    world = LayoutWorld(kind, seed)
    for _ in range(ROUNDS):
        events, held, _, _, before = run_round(world, kind != "ragged")
        most = 0
        for row, (event, lists) in enumerate(zip(events, before, strict=True)):
            num_local = event.position - event.frontier_blocks * SIZE
            assert int(held.num_local[row]) == num_local
            for head, pages in enumerate(lists):
                local = [world.own(block, head) for block in event.local_blocks]
                count = int(held.num_pages[row, head])
                assert count == len(pages)
                found = held.pages[row, head, : count + len(local)].tolist()
                assert found == pages + local
                most = max(most, count * SIZE + num_local)
        assert held.max_tokens == most
        assert held.pages.shape[-1] * SIZE >= most


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_first_says_where_lists_start(kind: str, seed: int) -> None:
    world = LayoutWorld(kind, seed)
    for _ in range(ROUNDS):
        events, _, _, lists, _ = run_round(world, kind != "ragged")
        index = torch.tensor([world.table.row_of[e.request_id] for e in events])
        assert torch.equal(world.tier.starts(index), lists.first)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind, fills", [("ragged", True), ("ragged", False), ("ragged, layers apart", True)]
)
def test_ragged_places(kind: str, fills: bool, seed: int) -> None:
    world = LayoutWorld(kind, seed)
    stayed = 0
    for _ in range(ROUNDS):
        events, _, quota, lists, before = run_round(world, fills)
        taken: set[tuple[int, int]] = set()
        for row, event in enumerate(events):
            found = split(lists, row)
            assert [len(pages) for pages in found] == quota[row]
            # With surplus the first superblocks are used.
            used = event.dest_blocks[: -(-sum(quota[row]) // NUM_HEADS)]
            for head, pages in enumerate(found):
                group = world.group_of(head)
                peers = [h for h in range(NUM_HEADS) if world.group_of(h) == group]
                usable = {world.own(block, h) for block in used for h in peers}
                assert set(pages) <= usable
                mine = {(group, page) for page in pages}
                assert len(mine) == len(pages) and not mine & taken
                taken |= mine
                could_stay = [page for page in before[row][head] if page in usable]
                assert pages[: len(could_stay)] == could_stay[: len(pages)]
                stayed += min(len(could_stay), len(pages))
    assert stayed > 10


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_unmoved_is_the_same_page_in_the_same_place(kind: str, seed: int) -> None:
    world = LayoutWorld(kind, seed)
    for _ in range(ROUNDS):
        _, _, _, lists, before = run_round(world, kind != "ragged")
        for row, old in enumerate(before):
            expected = [
                held[place : place + 1] == [page]
                for held, pages in zip(old, split(lists, row), strict=True)
                for place, page in enumerate(pages)
            ]
            if lists.unmoved is None:
                assert all(expected)
            else:
                assert lists.unmoved[row, : len(expected)].tolist() == expected
                assert not lists.unmoved[row, len(expected) :].any()


def test_equal_heads_keep_their_own_pages_of_the_destinations() -> None:
    world = LayoutWorld("equal", 0)
    for _ in range(ROUNDS):
        events, _, _, lists, _ = run_round(world, True)
        for row, event in enumerate(events):
            for head, pages in enumerate(split(lists, row)):
                assert pages == [world.own(block, head) for block in event.dest_blocks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_takes_a_slot_over_starts_empty(kind: str) -> None:
    world = LayoutWorld(kind, 1)
    events, *_ = run_round(world, True)
    slots = [world.table.row_of[event.request_id] for event in events]
    assert world.tier.starts(torch.tensor(slots)).any()
    world.tier.clear(slots[:1], torch.tensor(slots[:1]))
    first = world.tier.starts(torch.tensor(slots))
    assert not first[0].any() and first[1:].any(-1).all()


def random_counts(world: LayoutWorld, held: HeldPages) -> torch.Tensor:
    """Return [E, n] tokens below the frontier that a policy might choose."""
    draws = [
        [world.rng.randint(0, pages * SIZE) for pages in row]
        for row in held.num_pages.tolist()
    ]
    return torch.tensor(draws)


def keep_of(counts: torch.Tensor, held: HeldPages) -> torch.Tensor:
    """Return a choice [E, n, T] of as many tokens below the frontier, and all local."""
    token = torch.arange(held.max_tokens)
    is_local = token >= (held.num_pages * SIZE)[..., None]
    return (token < counts[..., None]) | is_local


@pytest.mark.parametrize("may_shrink", [True, False], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_quotas_fill_the_destinations(
    kind: str, seed: int, may_shrink: bool
) -> None:
    world = LayoutWorld(kind, seed)
    run_round(world, True)
    events = world.events()
    batch = world.open(events, may_shrink)
    held = batch.held
    counts = random_counts(world, held)
    quota = world.tier.quota(batch, keep_of(counts, held))
    width = NUM_HEADS // world.num_groups
    for row, event in enumerate(events):
        pages, chosen = quota[row].tolist(), counts[row].tolist()
        most = held.num_pages[row].tolist()
        assert all(page <= top for page, top in zip(pages, most, strict=True))
        floors = [min(-(-event.sinks // SIZE), top) for top in most]
        assert all(page >= least for page, least in zip(pages, floors, strict=True))
        asked = sum(-(-tokens // SIZE) for tokens in chosen)
        for first in range(0, NUM_HEADS, width):
            total = len(event.dest_blocks) * width
            if may_shrink and world.num_groups == 1:
                total = max(min(total, max(asked, 1)), sum(floors))
            assert sum(pages[first : first + width]) == total


def test_an_event_that_wants_nothing_keeps_a_page() -> None:
    world = LayoutWorld("ragged", 2)
    run_round(world, True)
    events = [replace(event, sinks=0) for event in world.events()]
    batch = world.open(events, dynamic=True)
    nothing = torch.zeros_like(batch.held.num_pages)
    quota = world.tier.quota(batch, keep_of(nothing, batch.held))
    assert quota.sum(-1).tolist() == [1] * len(events)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_choices_are_given_as_they_are(kind: str) -> None:
    """Policies without a say in lengths, on a server whose other ones have."""
    world = LayoutWorld(kind, 5)
    run_round(world, True)
    events = world.events()
    batch = world.open(events)
    num_dest = len(events[0].dest_blocks)
    counts = torch.full_like(batch.held.num_pages, num_dest * SIZE)
    # As if every head had been equally long until now.
    held = replace(batch.held, num_pages=torch.full_like(counts, num_dest + 1))
    quota = world.tier.quota(replace(batch, held=held), keep_of(counts, held))
    assert torch.equal(quota * SIZE, counts)
