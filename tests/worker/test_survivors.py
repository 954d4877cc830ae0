"""Values that follow tokens from event to event, against a dictionary per head."""

from itertools import accumulate
from random import Random

import pytest
import torch

from vllm_kvpolicy.worker.batch import HeldPages
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory

SLOTS, LAYERS, HEADS, SIZE, MOST_LOCAL, MOST_BLOCKS = 3, 2, 3, 4, 7, 8
NUM_HEADS, POOL_BLOCKS = LAYERS * HEADS, 1 + SLOTS * MOST_BLOCKS
CPU = torch.device("cpu")
NAMES = ("a", "b", "c")
ASKED = ("c", "a")  # of the three
KINDS = ("equal", "ragged", "ragged, layers apart")
Values = list[list[float]]  # per head, oldest token first


def make_memory() -> SurvivorMemory:
    slots = RequestTable(SLOTS, MOST_BLOCKS, SIZE, CPU)
    return SurvivorMemory(NAMES, slots, POOL_BLOCKS, NUM_HEADS, MOST_LOCAL)


class Chain:
    """Events of requests in all slots; heads keep random tokens.

    Args:
        kind: how pages are shared out.
        seed: of everything random.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.rng = kind, Random(seed)
        self.memory = make_memory()
        # A slot's values, and how many of each head's are of its global pool.
        self.known: dict[int, Values] = {}
        self.pages: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        for slot in range(SLOTS):
            self.clear(slot)

    def clear(self, slot: int) -> None:
        """Let a new request take a slot over."""
        self.memory.clear(torch.tensor([slot]))
        self.known[slot] = [[] for _ in range(NUM_HEADS)]
        self.pages[slot] = [0] * NUM_HEADS
        self.blocks[slot] = []

    def first(self, slot: int) -> list[int]:
        """Return where each head's pages start, one list behind the other."""
        return [0, *accumulate(self.pages[slot])]

    def event(self, slots: list[int]) -> None:
        """Read what is known, give every token a new value, keep some and write."""
        rng = self.rng
        newer = {
            slot: (rng.randint(2, 3), rng.randint(0, MOST_LOCAL)) for slot in slots
        }
        lengths = [self._lengths(slot, *newer[slot]) for slot in slots]
        longest = max(max(row) for row in lengths)
        index = torch.tensor(slots)
        first = torch.tensor([self.first(slot) for slot in slots])
        read, doubled = self.memory.read(ASKED, index, first, longest)
        assert torch.equal(doubled, 2 * read)
        found = read.tolist()
        for row, slot in enumerate(slots):
            for head, known in enumerate(self.known[slot]):
                length = lengths[row][head]
                expected = known + [0.0] * (length - len(known))
                assert found[row][head][:length] == expected, (slot, head)
        self._write(slots, newer, lengths, longest)

    def _lengths(self, slot: int, new_pages: int, num_local: int) -> list[int]:
        """Return the tokens that heads hold: what was local is full pages now."""
        pages = [count + new_pages for count in self.pages[slot]]
        # Local tokens of the last event fit into the pages that left.
        return [count * SIZE + num_local for count in pages]

    def _write(
        self,
        slots: list[int],
        newer: dict[int, tuple[int, int]],
        lengths: list[list[int]],
        longest: int,
    ) -> None:
        rng = self.rng
        values = torch.rand(len(slots), NUM_HEADS, longest)
        num_pages = [[p + newer[slot][0] for p in self.pages[slot]] for slot in slots]
        size = rng.randint(1, min(MOST_BLOCKS, min(map(min, num_pages))))
        width = size * NUM_HEADS * SIZE
        sources = []
        for row, slot in enumerate(slots):
            self.pages[slot] = self._quota(num_pages[row], size)
            numbers: list[int] = []
            for head, count in enumerate(self.pages[slot]):
                chosen = sorted(
                    rng.sample(range(num_pages[row][head] * SIZE), count * SIZE)
                )
                local = range(num_pages[row][head] * SIZE, lengths[row][head])
                mine = values[row, head]
                self.known[slot][head] = mine[[*chosen, *local]].tolist()
                numbers += [head * longest + token for token in chosen]
            sources.append(numbers + [-1] * (width - len(numbers)))
        held = HeldPages(
            pages=torch.zeros(0),
            num_pages=torch.tensor(num_pages),
            num_local=torch.tensor([newer[slot][1] for slot in slots]),
            max_tokens=longest,
        )
        self._move(slots, size)
        index = torch.tensor(slots)
        given = torch.stack([values, 2 * values])
        self.memory.write(ASKED, index, given, torch.tensor(sources), held)
        assert not self.memory.survivors[1].any() and not self.memory.local[1].any()

    def _move(self, slots: list[int], size: int) -> None:
        """Put slots onto superblocks that are free or were theirs."""
        for slot in slots:
            self.blocks[slot] = []
        taken = {block for blocks in self.blocks.values() for block in blocks}
        free = [block for block in range(POOL_BLOCKS) if block not in taken]
        self.rng.shuffle(free)
        table = self.memory.requests.global_blocks
        for slot in slots:
            self.blocks[slot] = [free.pop() for _ in range(size)]
            table[slot, :size] = torch.tensor(self.blocks[slot])

    def _quota(self, held: list[int], size: int) -> list[int]:
        """Return pages per head that fill `size` superblocks, or part of them."""
        if self.kind == "equal":
            return [size] * NUM_HEADS
        apart = self.kind.endswith("apart")
        width = HEADS if apart else NUM_HEADS
        quota = [0] * NUM_HEADS
        for start in range(0, NUM_HEADS, width):
            total = size * width
            if not apart:
                total = self.rng.randint(0, total)
            while total:
                head = self.rng.randrange(start, start + width)
                if quota[head] < held[head]:
                    quota[head] += 1
                    total -= 1
        return quota


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("kind", KINDS)
def test_values_follow_their_tokens(kind: str, seed: int) -> None:
    chain = Chain(kind, seed)
    for number in range(8):
        if number % 4 == 3:
            chain.clear(chain.rng.randrange(SLOTS))
        chain.event(chain.rng.sample(range(SLOTS), chain.rng.randint(1, SLOTS)))


def test_memory_counts_its_bytes() -> None:
    memory = make_memory()
    most = POOL_BLOCKS * SIZE + SLOTS * MOST_LOCAL
    held = memory.survivors.nbytes + memory.local.nbytes
    assert held == 4 * NUM_HEADS * most * len(NAMES)
    sizes = (SLOTS, POOL_BLOCKS, NUM_HEADS, SIZE, MOST_LOCAL)
    assert SurvivorMemory.nbytes_of(*sizes) * len(NAMES) == held
