"""Page lists of heads and KV heads folded into the batch, against loops over both."""

from typing import Any

import numpy as np
import pytest
import torch

from support.worker.page_lists import CPU, MOST, ROW, SIZE, SLOTS, Lists
from vllm_kvpolicy.worker.tiers import head_tables
from vllm_kvpolicy.worker.tiers.head_tables import (
    FoldedBatch,
    FoldedTables,
    fold_queries,
    unfold_output,
)

LAYERS, HEADS, BLOCKS = 2, 3, 90
OWN = torch.tensor([[0, 1, 2], [BLOCKS * HEADS + h for h in range(HEADS)]])


class Batch(Lists):
    """Four requests with random page lists, frontiers and lengths."""

    def __init__(self, seed: int, room: tuple[int, int] = (0, 0)) -> None:
        super().__init__(seed, OWN, BLOCKS, room)
        for name in "abc":
            self.event(name, self.rng.randint(0, 6))
        self.choose(4)
        for name in self.names:
            least = max(1, self.frontier[name] * SIZE)
            self.ends[name] = least + self.rng.randint(0, 9)

    def fold(
        self, counts: list[int], padding: int = 0, max_seq_len: int = 0
    ) -> FoldedBatch:
        """Fold a step in which requests compute `counts` tokens each."""
        common = self.metadata(counts, padding, max_seq_len)
        return self.folded.fold(self.tables, common, self.names)

    def check(self, folded: FoldedBatch, counts: list[int], padding: int = 0) -> None:
        """Compare every row that the kernel will see."""
        num_rows = len(self.names) + padding
        starts = folded.query_start.tolist()
        num_tokens = sum(counts)
        assert folded.tables.shape[:2] == (LAYERS, num_rows * HEADS)
        assert len(starts) == num_rows * HEADS + 1
        assert starts[len(self.names) * HEADS :] == [num_tokens * HEADS] * (
            padding * HEADS + 1
        )
        places = torch.arange(num_tokens * HEADS)
        if folded.order is not None:
            assert folded.order.sort().values.equal(places)
            places = folded.order
        for (token, head), place in np.ndenumerate(places.view(-1, HEADS).numpy()):
            request = int(np.searchsorted(np.cumsum(counts), token, side="right"))
            row = request * HEADS + head
            assert place == starts[row] + token - sum(counts[:request])
        for request, name in enumerate(self.names):
            for layer, head in np.ndindex(LAYERS, HEADS):
                which = layer * HEADS + head
                row = request * HEADS + head
                pages, own = self.held(name, which, self.ends[name])
                dropped = self.frontier[name] - len(pages)
                length = self.ends[name] - dropped * SIZE
                assert folded.lengths[layer, row] == length <= folded.max_length
                want = pages + own
                assert folded.tables[layer, row, : len(want)].tolist() == want
                assert starts[row + 1] - starts[row] == counts[request]


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 3, 2, 1]], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_padded_rows_read_nothing(counts: list[int], seed: int) -> None:
    batch = Batch(seed)
    folded = batch.fold(counts, padding=2)
    batch.check(folded, counts, padding=2)
    assert not folded.lengths[:, -2 * HEADS :].any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [(0, 0), (4, ROW + MOST)], ids=str)
def test_tables_are_up_to_date_at_every_step(
    room: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of earlier steps are used again: as they grow, change and have events."""
    batch, filled = Batch(seed, room), []
    expand = batch.tables.expand

    def counted(tables: Any, offsets: Any, which: torch.Tensor, *rest: Any) -> None:
        filled.append(len(which))
        expand(tables, offsets, which, *rest)

    monkeypatch.setattr(batch.tables, "expand", counted)
    rng, ones = batch.rng, [1] * 4
    addresses = set()
    for _ in range(60):
        for name in batch.names:
            grown = batch.ends[name] + rng.choice((1, 1, 1, 1, 30))
            batch.ends[name] = grown if grown <= ROW * SIZE else batch.ends[name]
        draw = rng.random()
        if draw < 0.1:
            name = rng.choice("abc")
            batch.event(name, batch.ends[name] // SIZE - rng.randint(0, 1))
        elif draw < 0.2:
            rng.shuffle(batch.names)
        counts = rng.choice((ones, ones, [1, 2, 1, 1], [7, 1, 5, 1]))
        folded = batch.fold(counts)
        assert (folded.order is None) == (counts == ones)
        batch.check(folded, counts)
        tensors = folded.tables, folded.lengths, folded.query_start
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert sum(filled) < 60 * 4 * 0.75, "rows are filled although nothing changed"
    # Where there is room from the start, as with graphs, nothing ever moves.
    assert (len(addresses) == 1) == (room != (0, 0))


def test_tables_that_graphs_read_are_not_made_anew() -> None:
    tables = FoldedTables(LAYERS, HEADS, 4, 9, CPU, is_final=True)
    before = tables.pages
    tables.make_room(4, 9)
    assert tables.pages is before
    for size in ((5, 9), (4, 10)):
        with pytest.raises(RuntimeError, match="at most 4 of 9"):
            tables.make_room(*size)


def test_a_captured_batch_may_hold_the_longest_request() -> None:
    """Kernels choose how to share out work by a length that replays will exceed."""
    batch = Batch(0, (8, 80))
    batch.folded.warm_up(batch.tables, ROW)
    batch.names, batch.rows, batch.ends = [], {}, {}
    folded = batch.fold([], padding=3, max_seq_len=320)
    assert folded.max_length == 320 and folded.order is None
    batch = Batch(0, (8, 80))
    folded = batch.fold([1] * 4, max_seq_len=320)
    assert int(folded.lengths.max()) <= folded.max_length < 320


def test_tables_of_a_captured_batch_are_those_of_its_replay() -> None:
    """A smaller batch reads the first rows of the same tensors."""
    batch = Batch(0, (8, 80))
    whole = batch.fold([1] * 4, padding=4)
    part = batch.fold([1] * 4)
    for name in ("tables", "lengths", "query_start"):
        one, other = getattr(whole, name), getattr(part, name)
        assert one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    assert whole.tables.shape == (LAYERS, 8 * HEADS, 80)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_query_heads_stand_with_their_kv_head(num_tokens: int, is_mixed: bool) -> None:
    group, dim = 2, 4
    query = torch.randn(num_tokens, HEADS * group, dim)
    order = torch.randperm(num_tokens * HEADS) if is_mixed else None
    folded = fold_queries(query, HEADS, order)
    assert folded.shape == (num_tokens * HEADS, group, dim)
    strided = torch.randn(num_tokens, HEADS * group + 5, dim)[:, 3:-2].copy_(query)
    assert torch.equal(fold_queries(strided, HEADS, order), folded)
    for token, head in np.ndindex(num_tokens, HEADS * group):
        kv_head, member = divmod(head, group)
        row = token * HEADS + kv_head
        place = row if order is None else int(order[row])
        assert torch.equal(folded[place, member], query[token, head])


def test_unfolding_undoes_folding() -> None:
    query, order = torch.randn(7, 6, 4), torch.randperm(21)
    assert torch.equal(unfold_output(fold_queries(query, 3, order), 3, order), query)
    assert torch.equal(fold_queries(query, 3, None).view(query.shape), query)


# -- page lists ------------------------------------------------------------------------


def longest_lists(batch: Batch) -> list[int]:
    """Return the pages of the longest list of a, b and c."""
    return [max(map(len, batch.lists[name])) for name in "abc"]


def test_clear_empties_only_the_rows_that_it_names() -> None:
    batch = Batch(3)
    tables, rows = batch.tables, [batch.requests.row_of[name] for name in "abc"]
    held = [sum(map(len, batch.lists[name])) for name in "abc"]
    assert tables.counts(rows)[1].tolist() == held and all(held)
    tables.clear(rows[:2], torch.tensor(rows[:2]))
    assert tables.counts(rows)[1].tolist() == [0, 0, held[2]]
    assert tables.first[rows, -1].tolist() == [0, 0, held[2]]
    assert tables.counts(rows)[0].tolist() == [0, 0, longest_lists(batch)[2]]


class Late:
    """Integers that arrive when they are asked for, or when told."""

    here = False

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def is_here(self) -> bool:
        return self.here

    def read(self) -> np.ndarray:
        return self.values.numpy()


def test_longest_lists_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes what is known otherwise until they are here; an event waits."""
    monkeypatch.setattr(head_tables, "HostCopy", Late)
    batch = Batch(1)
    tables, (a, b, c) = batch.tables, (batch.requests.row_of[name] for name in "abc")
    _, longest, last = longest_lists(batch)
    slots, otherwise = np.array([b, a, SLOTS, b]), np.array([40, 41, 0, 40])
    assert tables.most(slots, otherwise).tolist() == [40, 41, 0, 40]
    assert tables.counts([b])[0].tolist() == [longest]
    assert tables.most(slots, otherwise).tolist() == [longest, 41, 0, longest]
    tables.clear([a], torch.tensor([a]))
    assert tables.most(slots, otherwise).tolist() == [longest, 0, 0, longest]
    monkeypatch.setattr(Late, "here", True)
    assert tables.most(np.array([c]), np.array([9])).tolist() == [last]
