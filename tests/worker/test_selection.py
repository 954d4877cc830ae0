"""Rows that are cut, pages that are left out, and what one layer of a step reads."""

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support.words import built
from support.worker.page_lists import SIZE, Lists
from vllm_kvpolicy.kernels.page_bounds import best_pages
from vllm_kvpolicy.policies.selections.quest import Quest
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.tiers.head_tables import FoldedBatch
from vllm_kvpolicy.worker.tiers.page_selection import (
    PageSelection,
    SelectedBatch,
    cut_rows,
)

LAYERS, HEADS, GROUP, DIM, BLOCKS = 2, 2, 2, 6, 80


# -- rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_rows(seed: int) -> None:
    rng = Random(seed)
    counts = [rng.choice((0, 1, 1, 2, 7)) for _ in range(rng.randint(1, 6))]
    alone = [rng.randint(0, count) for count in counts]
    start = rng.choice((0, 3))
    starts = np.cumsum([start, *counts])
    row, first, stands = cut_rows(starts, np.array(alone))
    want = []
    for number, (count, last) in enumerate(zip(counts, alone, strict=True)):
        if count > last or not count:
            want.append((number, count - last, False))
        want += [(number, 1, True)] * last
    sizes = np.diff(first).tolist()
    assert list(zip(row.tolist(), sizes, stands.tolist(), strict=True)) == want
    assert first[0] == start and first[-1] == starts[-1]


# -- pages -----------------------------------------------------------------------------


def narrowed(
    scores: list[float], num_global: int, num_read: int, num_local: int = 2
) -> list[int]:
    """Return the pages that one row reads; its pages are 10, 11, 12, ..."""
    width = num_global + num_local + 1  # the last column is nobody's
    row = torch.full((1, width), torch.finfo(torch.float32).min)
    row[0, :num_global] = torch.tensor(scores)
    table = torch.arange(10, 10 + width, dtype=torch.int32)[None]
    counts = torch.tensor([[num_global], [num_read]])
    found = best_pages(table, row, *counts)
    assert found.shape == table.shape and found.dtype == torch.int32
    return found[0, : num_read + num_local].tolist()


def test_the_best_pages_stay_in_their_order() -> None:
    assert narrowed([0.5, 3.0, -1.0, 2.0], 4, 2) == [11, 13, 14, 15]
    assert narrowed([0.5, 3.0, -1.0, 2.0], 4, 4) == [10, 11, 12, 13, 14, 15]
    assert narrowed([0.5, 3.0, -1.0, 2.0], 4, 0) == [14, 15]
    assert narrowed([], 0, 0) == [10, 11]


def test_of_equal_pages_the_earlier_is_read() -> None:
    assert narrowed([1.0, 2.0, 1.0, 1.0], 4, 2) == [10, 11, 14, 15]
    assert narrowed([0.0, -0.0, 0.0], 3, 2) == [10, 11, 13, 14]
    assert narrowed([-5.0] * 40, 40, 3) == [10, 11, 12, 50, 51]


@pytest.mark.parametrize(("local", "pages"), [(1, 5), (4, 4), (5, 4), (20, 0), (99, 0)])
def test_the_budget_counts_local_tokens(local: int, pages: int) -> None:
    """20 tokens: pages of 4 that fill what local tokens leave, rounded up."""
    assert built(Quest, quest_budget=20).most_pages(np.array([local]), 4).tolist() == [
        pages
    ]


# -- a step ----------------------------------------------------------------------------


class Step(Lists):
    """Requests "a", "b" and "c"; "s" has no selection.

    Args:
        budget: of the selection.
    """

    def __init__(self, seed: int, budget: int) -> None:
        self.draws = torch.Generator().manual_seed(seed)
        shape = LAYERS, BLOCKS, HEADS, SIZE, 2 * DIM
        self.caches = torch.randn(shape, generator=self.draws)
        self.pool = PagePool(list(self.caches), keys_are_columns=False)
        super().__init__(seed, self.pool.null_pages[0, ..., 0], BLOCKS)
        self.budget, quest = budget, built(Quest, quest_budget=budget)
        self.selection = PageSelection(quest, ["q"], self.requests, self.pool, GROUP)
        self.selection.bounds.fill_(torch.nan)
        self.prompt = {"n": 3}
        for name in "abcs":
            frontier = self.rng.randint(2, 6)
            row, pages = self.event(name, frontier)
            self.prompt[name] = frontier * SIZE + self.rng.randint(0, 3)
            policy = "stock" if name == "s" else "q"
            event: Any = SimpleNamespace(policy=policy, prompt_tokens=self.prompt[name])
            self.selection.update([row], [event], pages)
        self.choose(5)

    def run(self, counts: list[int], padding: int = 0) -> FoldedBatch | SelectedBatch:
        """Fold a step and narrow it down; it begins a little behind the prompt."""
        for name, count in zip(self.names, counts, strict=True):
            late = int(name == "a") or self.rng.randint(0, 2)
            self.ends[name] = self.prompt[name] - 1 + late + count
        common = self.metadata(counts, padding)
        held = self.folded.fold(self.tables, common, self.names)
        return self.selection.narrow(common, self.names, held)

    def wanted(self, layer: int, head: int, row: int, queries: Any, end: int) -> Any:
        """Return pages and length of a query of a request at position `end` - 1."""
        name = self.names[row]
        pages, own = self.held(name, layer * HEADS + head, end)
        local = end - self.frontier[name] * SIZE
        if name in "ns" or end <= self.prompt[name]:
            return pages + own, len(pages) * SIZE + local
        count = -(-max(self.budget - local, 0) // SIZE)
        keys = self.pool.keys[0]
        scores = []
        for page in pages:
            low, high = keys[page].amin(0), keys[page].amax(0)
            parts = [float(torch.maximum(q * low, q * high).sum()) for q in queries]
            scores.append(max(parts))
        best = sorted(range(len(pages)), key=lambda n: (-scores[n], n))[:count]
        return [pages[n] for n in sorted(best)] + own, len(best) * SIZE + local


COUNTS = [[1] * 5, [1, 2, 1, 1, 1], [5, 1, 3, 1, 7], [2, 2, 2, 2, 2]]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_query_reads_what_it_chooses(
    counts: list[int], padding: int, seed: int
) -> None:
    """Whatever its neighbours, and beside other tokens of its request."""
    step = Step(seed, budget=14)
    batch = step.run(counts, padding)
    assert isinstance(batch, SelectedBatch)
    num_tokens = sum(counts)
    if max(counts) == 1:
        assert batch.folded.order is None
    for layer in range(LAYERS):
        shape = num_tokens + 1, HEADS * GROUP, DIM  # a token of padding behind
        query = torch.randn(shape, generator=step.draws)
        read = batch.of_layer(layer, query)
        starts = read.query_start.tolist()
        assert starts[-1] == num_tokens * HEADS
        order = torch.arange(num_tokens * HEADS)
        order = order if read.order is None else read.order
        assert order.sort().values.equal(torch.arange(num_tokens * HEADS))
        places = order.view(num_tokens, HEADS).tolist()
        token = 0
        for row, count in enumerate(counts):
            for number in range(count):
                for head in range(HEADS):
                    place = places[token][head]
                    mine = int(np.searchsorted(starts, place, side="right")) - 1
                    behind = starts[mine + 1] - place - 1
                    queries = query[token].view(HEADS, GROUP, DIM)[head]
                    end = step.ends[step.names[row]] - count + number + 1
                    pages, length = step.wanted(layer, head, row, queries, end)
                    # Where the kernel stops for this query of its row.
                    assert int(read.lengths[mine]) - behind == length
                    table = read.tables[mine, : -(-length // SIZE)].tolist()
                    assert table == pages
                token += 1


def test_nothing_is_chosen_where_all_may_be_read() -> None:
    step = Step(0, budget=10_000)
    assert isinstance(step.run([1] * 5), FoldedBatch)
    step = Step(0, budget=14)
    step.names = ["n", "s", "n", "s", "n"]
    assert isinstance(step.run([1] * 5), FoldedBatch)


def test_requests_that_are_gone_select_no_longer() -> None:
    """Their slot may be another's, who has had no event of a selecting policy."""
    step = Step(1, budget=14)
    slot = step.requests.row_of["a"]
    assert step.selection._selects[slot]
    event: Any = SimpleNamespace(policy="stock", prompt_tokens=5)
    step.selection.update([slot], [event], torch.zeros(1, 4, dtype=torch.int64))
    assert not step.selection._selects[slot]


def test_a_layer_waits_for_nothing() -> None:
    """Values read on the host raise on fake tensors, and so do tensors left there."""
    step = Step(2, budget=14)
    batch = step.run([5, 1, 3, 1, 7])
    assert isinstance(batch, SelectedBatch)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if torch.is_tensor(value) else value

        folded = FoldedBatch(**{k: fake(v) for k, v in vars(batch.folded).items()})
        fields = {name: fake(value) for name, value in vars(batch).items()}
        faked = SelectedBatch(**(fields | {"folded": folded}))
        query = torch.zeros(17, HEADS * GROUP, DIM)
        read = faked.of_layer(0, query)
        assert len(read.tables) == len(read.lengths) == len(batch.scored[0])
