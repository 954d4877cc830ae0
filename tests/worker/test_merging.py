"""Merging on the cache: what attention reads afterwards, against the closed form.

The real compactor, layout and Hard-KV with a window of one query and groups of one
query head, so that weights are those of the query that the check attends with.
"""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from support.worker.tiers import make_tier
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies.base import Decision, EventInputs, Merge, Policy
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.head_tables import HeadTables

LAYERS, HEADS, BLOCK, SIZE, BLOCKS, SINKS = 2, 3, 4, 8, 40, 2
NUM_HEADS = LAYERS * HEADS
SCALE, CPU = SIZE**-0.5, torch.device("cpu")
# Per request: tokens held, whole pages of them below the frontier, of them kept.
REQUESTS = ((53, 12, 7), (70, 16, 7))
LAYOUTS = ("ragged", "ragged, layers apart", "equal")
# One whose heads may leave destinations empty, and nothing is kept by rule.
DYNAMIC = "ragged, dynamic"
Head = tuple[int, int]  # request, layer * H + head


class Recorded:
    """A policy that notes what it decided, with or without pairs of its own.

    Args:
        policy: decides.
        pairs: whether to keep the policy's pairs, or give up all.
    """

    def __init__(self, policy: Policy, pairs: bool) -> None:
        self.policy, self.pairs = policy, pairs
        self.decisions: list[Decision] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        got = self.policy.decide(inputs, budget)
        self.decisions.append(got)
        return got if self.pairs else replace(got, merge=None)


class World:
    """Two requests in one cache, before and after an event of each.

    Args:
        layout: one of `LAYOUTS`, or `DYNAMIC`.
        pairs: whether survivors take dropped tokens in.
        merge: Hard-KV's option.
        dtype: of the cache.
        seed: of keys, values and queries.
    """

    def __init__(
        self,
        layout: str,
        pairs: bool = True,
        merge: bool = True,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, HEADS, BLOCK, 2 * SIZE)
        whole = torch.randn(shape, generator=generator).to(dtype)
        queries = torch.randn((LAYERS, 3, HEADS * SIZE), generator=generator) * 2
        order = torch.randperm(BLOCKS - 1, generator=generator) + 1
        first_blocks, self.lent = (order[:14], order[14:32]), order[32:34].tolist()
        places = whole.view(LAYERS, BLOCKS, 2 * BLOCK, HEADS * SIZE)
        places[:, self.lent, 0] = queries[:, :2].to(dtype)
        apart = [layer.clone() for layer in whole]
        self.pool = PagePool(apart if "apart" in layout else list(whole), False)
        self.null = self.pool.null_pages.flatten()
        self.is_ragged, self.is_dynamic = layout != "equal", layout == DYNAMIC
        self.requests = RequestTable(len(REQUESTS), BLOCKS, BLOCK, CPU)
        self.windows = QueryWindows(1, 0, CPU)
        self.windows.bind(self.pool)
        options = {"window": 1, "hard_p": 0.6, "hard_lower": 0.1, "hard_merge": merge}
        options["hard_mode"] = "dynamic" if self.is_dynamic else "fixed"
        self.policy = Recorded(factory.build("hard-keydiff", options), pairs)
        self.events = [
            self._event(row, blocks.tolist()) for row, blocks in enumerate(first_blocks)
        ]
        self.before = {at: self._held(*at) for at in self.heads()}
        tier = make_tier(self.is_ragged, self.requests, self.pool, BLOCKS)
        self.tables: HeadTables | None = getattr(tier, "lists", None)
        self.compactor = Compactor(
            policies={"hard": self.policy},
            pool=self.pool,
            tier=tier,
            requests=self.requests,
            captures=[self.windows],
            memory=SurvivorMemory((), self.requests, BLOCKS, NUM_HEADS, BLOCK),
            rope=None,
            scale=SCALE,
        )
        answers = [a for each in self.compactor.run(self.events) for a in each.read()]
        assert len(answers) == (len(self.events) if self.is_dynamic else 0)
        self.after = {at: self._left(*at) for at in self.heads()}

    @staticmethod
    def heads() -> list[Head]:
        return list(product(range(len(REQUESTS)), range(NUM_HEADS)))

    def _event(self, row: int, blocks: list[int]) -> CompactEvent:
        position, frontier, num_dest = REQUESTS[row]
        return CompactEvent(
            request_id=f"r{row}",
            serial=row,
            policy="hard",
            ordinal=0,
            position=position,
            frontier_blocks=frontier,
            budget=num_dest * BLOCK + 2,
            sinks=0 if self.is_dynamic else SINKS,
            prompt_tokens=position,
            num_global=0,
            source_blocks=tuple(blocks[:frontier]),
            dest_blocks=tuple(blocks[2 : 2 + num_dest]),
            local_blocks=tuple(blocks[frontier : -(-position // BLOCK)]),
            window_blocks=(self.lent[row],),
        )

    def _read(self, head: int, pages: torch.Tensor, count: int) -> torch.Tensor:
        """Return [2, T, D] float64, keys and values of a list of pages."""
        layer = head // HEADS
        parts = self.pool.keys[layer][pages], self.pool.values[layer][pages]
        return torch.stack([part.flatten(0, 1)[:count] for part in parts]).double()

    def _held(self, row: int, head: int) -> torch.Tensor:
        event = self.events[row]
        blocks = torch.tensor([event.source_blocks + event.local_blocks])
        pages = self.pool.own_pages(blocks)[0].flatten(0, 1)[head]
        return self._read(head, pages, event.position)

    def _left(self, row: int, head: int) -> torch.Tensor:
        event = self.events[row]
        local = torch.tensor([event.local_blocks])
        slot = torch.tensor([self.requests.row_of[event.request_id]])
        if self.tables is not None:
            listed = self.tables.first[slot].diff()[0]
            count = int(listed[head])
            row = torch.empty(1, 1, NUM_HEADS, 40, dtype=torch.int32)
            nothing = torch.zeros_like(self.requests.frontier_blocks)
            self.tables.expand(
                row, row[..., 0].clone(), slot * 0, slot, local.int(), nothing
            )
            pages = row[0, 0, head].long()
        else:
            count = len(event.dest_blocks)
            blocks = torch.tensor([event.dest_blocks + event.local_blocks])
            pages = self.pool.own_pages(blocks)[0].flatten(0, 1)[head]
        pages = pages[: count + len(event.local_blocks)]
        return self._read(head, pages, count * BLOCK + event.local_tokens(BLOCK))

    def query(self, row: int, head: int) -> torch.Tensor:
        needs = self.policy.needs
        rows = self.windows.numbers([self.events[row]], needs)["window_rows"]
        windows = self.windows.queries(torch.as_tensor(rows), needs.window_tokens)
        return windows[0, head // HEADS, head % HEADS, 0].double()

    def merge(self, row: int, head: int) -> Merge:
        """Return the pairs of one head; events are batches of their own."""
        (decision,) = self.policy.decisions
        assert decision.merge is not None
        at = row, head // HEADS, head % HEADS
        return Merge(decision.merge.partner[at], decision.merge.weight[at])


world = cache(World)


def survivors(layout: str, row: int, head: int) -> list[int]:
    """Tokens that a head holds after the event, found by their keys without merges."""
    plain = world(layout, False)
    before, after = plain.before[row, head][0], plain.after[row, head][0]
    found = (after[:, None] == before).all(-1)
    assert (found.sum(-1) == 1).all()
    return found.long().argmax(-1).tolist()


def merged(layout: str, row: int, head: int) -> dict[int, tuple[int, float]]:
    """Partner and weight of the survivors that have taken a dropped token in."""
    pairs, left = world(layout).merge(row, head), survivors(layout, row, head)
    found = {token: int(pairs.partner[token]) for token in left}
    return {
        token: (other, float(pairs.weight[token]))
        for token, other in found.items()
        if other >= 0 and other not in left
    }


def attend(
    query: torch.Tensor, held: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one query over keys and values [2, T, D]."""
    logits = held[0] @ query * SCALE + bias
    return torch.softmax(logits, 0) @ held[1], logits.logsumexp(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_over_the_merged_cache_is_the_closed_form(layout: str) -> None:
    events = world(layout)
    num_pairs, num_refilled, lengths = 0, 0, set()
    for row, head in events.heads():
        left, pairs = survivors(layout, row, head), merged(layout, row, head)
        query = events.query(row, head)
        keys, values = events.before[row, head]
        logits = (keys @ query * SCALE).tolist()
        scores, outputs, entropies = [], [], []
        for token in left:
            other, share = pairs.get(token, (token, 1.0))
            # From logits and values alone; no key of the cache is mixed here.
            scores.append(share * logits[token] + (1 - share) * logits[other])
            outputs.append(share * values[token] + (1 - share) * values[other])
            parts = (share, 1 - share)
            entropies.append(-sum(p * math.log(p) for p in parts if p > 0))
        form = torch.tensor(scores).double(), torch.stack(outputs)
        held, none = events.after[row, head], torch.zeros(len(left)).double()
        output, lse = attend(query, held, none)
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(lse, form[0].logsumexp(0), **close)
        torch.testing.assert_close(output, torch.softmax(form[0], 0) @ form[1], **close)
        # With the entropies of the weights as a bias nothing of a pair is lost.
        tokens = [*left, *(other for other, _ in pairs.values())]
        whole = attend(query, events.before[row, head][:, tokens], torch.tensor(0.0))
        biased = attend(query, held, torch.tensor(entropies).double())
        torch.testing.assert_close(biased, whole, **close)
        wanted = (events.merge(row, head).partner >= 0).sum()
        num_refilled += int(wanted) - len(pairs)
        num_pairs += len(pairs)
        lengths.add(len(left))
    assert num_pairs > 20 and num_refilled > 0
    assert (len(lengths) > len(REQUESTS)) == events.is_ragged


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_pairs_change_and_no_sink_or_local_token(layout: str) -> None:
    plain, events = world(layout, False), world(layout)
    for row, head in events.heads():
        left, pairs = survivors(layout, row, head), merged(layout, row, head)
        changed = (plain.after[row, head] != events.after[row, head]).any(-1)
        for place, token in enumerate(left):
            assert changed[:, place].all() == (token in pairs)
            assert changed[:, place].any() == (token in pairs)
        frontier = events.events[row].frontier_blocks * BLOCK
        touched = {*pairs, *(other for other, _ in pairs.values())}
        assert min(touched) >= SINKS and max(touched) < frontier


@pytest.mark.parametrize("seed", range(4))
def test_empty_destinations_take_nothing_in(seed: int) -> None:
    plain, events = (World(DYNAMIC, pairs, seed=seed) for pairs in (False, True))
    for row, head in events.heads():
        before, pairs = events.before[row, head], events.merge(row, head)
        found = plain.after[row, head][0][:, None] == before[0]
        left = found.all(-1).long().argmax(-1).tolist()
        for part in range(2):
            for place, token in enumerate(left):
                other, share = int(pairs.partner[token]), float(pairs.weight[token])
                if other < 0 or other in left:
                    other, share = token, 1.0
                want = share * before[part, token] + (1 - share) * before[part, other]
                got = events.after[row, head][part, place]
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, other in zip(events.pool.keys, plain.pool.keys, strict=True):
        assert torch.equal(mine[events.null], other[events.null])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_option_the_cache_is_the_same(
    layout: str, dtype: torch.dtype
) -> None:
    off, dropped = World(layout, True, False, dtype), World(layout, False, True, dtype)
    assert off.policy.decisions[0].merge is None
    for part in ("keys", "values"):
        both = zip(getattr(off.pool, part), getattr(dropped.pool, part), strict=True)
        assert all(torch.equal(mine, other) for mine, other in both)
    if off.tables is not None:
        assert torch.equal(off.tables.pages, dropped.tables.pages)
