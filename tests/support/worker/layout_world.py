"""Requests in random states for tests of layouts: superblocks and page lists."""

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.tiers.equal import EqualTier, PhysicalTables
from vllm_kvpolicy.worker.tiers.head_tables import FoldedTables, HeadTables
from vllm_kvpolicy.worker.tiers.ragged import RaggedTier
from vllm_kvpolicy.worker.tiers.tier import Tier
from vllm_kvpolicy.worker.transfer import to_device_together

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 60, 2, 4, 2
NUM_HEADS = LAYERS * HEADS
SLOTS, MOST_BLOCKS = 4, 20
KINDS = ("equal", "ragged", "ragged, layers apart")
CPU = torch.device("cpu")


@dataclass
class Request:
    """What one request holds; `lists` are page ids per head, below the frontier."""

    frontier: int = 0
    global_blocks: list[int] = field(default_factory=list)
    local_blocks: list[int] = field(default_factory=list)
    lists: list[list[int]] = field(
        default_factory=lambda: [[] for _ in range(NUM_HEADS)]
    )


class LayoutWorld:
    """A tier, its tables, and requests that share superblocks out among them.

    Args:
        kind: one of `KINDS`.
        seed: of everything random.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = Random(seed)
        self.kind = kind
        self.is_ragged = kind != "equal"
        whole = torch.zeros(LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM)
        apart = kind.endswith("apart")
        self.pool = PagePool([x.clone() if apart else x for x in whole], False)
        self.table = RequestTable(SLOTS, MOST_BLOCKS, SIZE, CPU)
        physical = PhysicalTables(self.table, 0, 0)
        self.tier: Tier = EqualTier(self.table, self.pool, physical)
        if self.is_ragged:
            first = self.pool.own_pages(torch.zeros(1, 1, dtype=torch.int64))
            tables = HeadTables(SLOTS, MOST_BLOCKS, first.flatten(), HEADS, CPU)
            room = FoldedTables(LAYERS, HEADS, 0, 0, CPU)
            self.tier = RaggedTier(self.table, self.pool, tables, room)
        self.num_groups = LAYERS if self.is_ragged and apart else 1
        self.free = self.rng.sample(range(1, BLOCKS), BLOCKS - 1)
        self.requests = {f"r{number}": Request() for number in range(3)}
        self.ordinal = 0

    def own(self, block: int, head: int) -> int:
        """Return the id of a head's stock page."""
        layer, kv_head = divmod(head, HEADS)
        first = layer * BLOCKS * HEADS if self.pool.spans_layers else 0
        return first + block * HEADS + kv_head

    def group_of(self, head: int) -> int:
        """Return the part of the heads among which a head's pages may move."""
        return head // HEADS if self.num_groups > 1 else 0

    def events(self) -> list[CompactEvent]:
        """Let every request grow, and give each an event with as many destinations.

        Later events take superblocks that earlier ones gave up.
        """
        counts = [self._grow(request) for request in self.requests.values()]
        num_dest = self.rng.randint(1, min(counts))
        events = [
            self._event(name, request, num_dest)
            for name, request in self.requests.items()
        ]
        self.ordinal += 1
        return events

    def _grow(self, request: Request) -> int:
        count = self.rng.randint(2, 4)
        request.local_blocks += [self.free.pop() for _ in range(count)]
        return len(request.global_blocks + request.local_blocks) - 1

    def _event(self, name: str, request: Request, num_dest: int) -> CompactEvent:
        rng = self.rng
        leaving = request.local_blocks[:-1]
        source = request.global_blocks + leaving
        if rng.random() < 0.4:
            dest = source[:num_dest]
        else:
            dest = rng.sample(source + self.free[:2], num_dest)
        local = request.local_blocks[-1:]
        request.frontier += len(leaving)
        event = CompactEvent(
            request_id=name,
            serial=0,
            policy="any",
            ordinal=self.ordinal,
            position=request.frontier * SIZE + rng.randint(0, SIZE),
            frontier_blocks=request.frontier,
            budget=0,
            sinks=min(rng.choice((0, 1, SIZE, SIZE + 1)), num_dest * SIZE),
            prompt_tokens=1,
            num_global=len(request.global_blocks),
            source_blocks=tuple(source),
            dest_blocks=tuple(dest),
            local_blocks=tuple(local),
        )
        gone = [block for block in source if block not in dest]
        self.free = gone + [block for block in self.free if block not in dest]
        request.global_blocks, request.local_blocks = dest, local
        return event

    def before(self, event: CompactEvent) -> list[list[int]]:
        """Return each head's pages below the frontier, oldest first."""
        request = self.requests[event.request_id]
        return [
            pages + [self.own(block, head) for block in event.leaving_blocks]
            for head, pages in enumerate(request.lists)
        ]

    def open(self, events: list[CompactEvent], dynamic: bool = False) -> Batch:
        """Return the events as a batch, its rows empty at first events."""
        rows = [self.table.take(event.request_id) for event in events]
        index = torch.tensor(rows)
        if events[0].ordinal == 0:
            self.tier.clear(rows, index)
        policy: Any = SimpleNamespace(dynamic=dynamic)
        sent = to_device_together(self.tier.numbers(events, rows), CPU)
        held = self.tier.held(events, rows, sent)
        return Batch(events, policy, rows, sent, held)

    def random_quota(self, event: CompactEvent, fills: bool) -> list[int]:
        """Return pages per head, at most those held and those of the destinations."""
        num_dest = len(event.dest_blocks)
        if not self.is_ragged:
            return [num_dest] * NUM_HEADS
        quota = [0] * NUM_HEADS
        held = [len(pages) for pages in self.before(event)]
        for group in range(self.num_groups):
            heads = [head for head in range(NUM_HEADS) if self.group_of(head) == group]
            total = min(num_dest * len(heads), sum(held[head] for head in heads))
            if not fills:
                total = self.rng.randint(1, total)
            while total:
                head = self.rng.choice([h for h in heads if quota[h] < held[h]])
                quota[head] += 1
                total -= 1
        return quota
