"""Scheduler's and worker's halves of an event, joined without vLLM's engine.

The real planner, manager and block pool; the real compactor and tables on keys that say
whose they are; every token of every head is checked after every step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool

from support.worker.chain_oracle import Chosen, Rules, is_ascending, survivors
from support.worker.chain_policy import MARK, Seen, mark
from support.worker.tiers import make_tier
from vllm_kvpolicy.block_manager.manager import KVPolicyManager, KVPolicySpec
from vllm_kvpolicy.block_manager.other_groups import OtherBlocks
from vllm_kvpolicy.block_manager.planner import Planner, RequestPlan
from vllm_kvpolicy.events import EventPlan, Footprint
from vllm_kvpolicy.policies.compose import POSITIONS
from vllm_kvpolicy.protocol import CompactEvent, StepCommands, UsedBlocks
from vllm_kvpolicy.sizes import PlannerLimits
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.runtime import KVPolicyRuntime
from vllm_kvpolicy.worker.survivors import SurvivorMemory

LAYERS, HEADS, SIZE, DIM = 2, 3, 4, 4
NUM_HEADS = LAYERS * HEADS
RECENT, LONGEST, MOST_LIVE = 5, 130, 4
BUDGET = 24
POISON = -777.0
CPU = torch.device("cpu")


@dataclass
class Live:
    """A request and what each of its heads should hold below the frontier."""

    number: int
    last: int
    plan: EventPlan | None
    sinks: int
    computed: int = 0
    frontier: int = 0
    last_event: int = 0
    kept: list[list[int]] = field(
        default_factory=lambda: [[] for _ in range(NUM_HEADS)]
    )
    # By head, what merges have made of positions.
    mixed: list[dict[int, float]] = field(
        default_factory=lambda: [{} for _ in range(NUM_HEADS)]
    )

    def held(self, head: int) -> list[int]:
        """Return the positions that a head holds, oldest first."""
        return self.kept[head] + list(range(self.frontier, self.computed))

    def codes(self, head: int, positions: Sequence[int]) -> torch.Tensor:
        """Return [T, D] keys of one head's tokens; values are their negative."""
        mixed = [self.mixed[head].get(p, p) for p in positions]
        rows = [[self.number, head, p, 1] for p in mixed]
        return torch.tensor(rows).view(-1, DIM).float()

    def keep(self, head: int, tokens: list[int], note: Seen) -> None:
        """Keep some of the tokens that a head holds; each may take a dropped one in."""
        held, merge, mixed = self.held(head), note.decision.merge, {}
        for token in tokens:
            position, share = held[token], 1.0
            mixed[position] = self.mixed[head].get(position, position)
            if merge is not None:
                other = int(note.heads(merge.partner)[head, token])
                share = float(note.heads(merge.weight)[head, token])
                if other >= 0 and other not in tokens:
                    taken = self.mixed[head].get(held[other], held[other])
                    mixed[position] = share * mixed[position] + (1 - share) * taken
        self.kept[head], self.mixed[head] = [held[token] for token in tokens], mixed


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two sets of keys are equal, but for rounded merges."""
    return found.shape == want.shape and torch.allclose(found, want, atol=1e-3)


def check_seen(state: Live, note: Seen, frontier: int) -> None:
    """Compare what a policy saw with what the request held."""
    assert state.plan is not None
    given, end = note.inputs, int(note.inputs.end[note.event])
    assert (end, note.budget) == (state.computed, state.plan.budget)
    keys, values, positions = map(
        note.heads, map(given.given, ("keys", "values", "positions"))
    )
    must_keep, marked = note.heads(given.must_keep), note.heads(given.memory[MARK])
    for head, length in enumerate(note.heads(given.lengths).tolist()):
        held = state.held(head)
        assert length == len(held)
        assert positions[head, :length].tolist() == held
        want = state.codes(head, held)
        assert same(keys[head, :length], want)
        assert same(values[head, :length], -want)
        must = [p < state.sinks or p >= frontier for p in held]
        padding = must_keep.shape[-1] - length
        assert must_keep[head].tolist() == must + [False] * padding
        marks = [
            mark(state.last_event, head, p) if p < state.last_event else 0 for p in held
        ]
        assert marked[head, :length].tolist() == marks


@dataclass(frozen=True)
class Setup:
    """One chain: policy, layout of the pool, and how late answers are.

    `moves` drops nothing and leaves survivors in any order.
    """

    policy: Any
    is_ragged: bool
    columns: bool = False
    place: Any = None
    latest: int = 0
    moves: bool = False
    num_blocks: int = 70
    seed: int = 0
    room: float = inf


class Chain:
    """Several requests on one pool; see `Setup`."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.rng = setup, Random(setup.seed)
        self.blocks = BlockPool(setup.num_blocks, False, hash_block_size=SIZE)
        self.planner = Planner(PlannerLimits(SIZE, 3))
        spec = KVPolicySpec(
            block_size=SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32
        )
        self.manager = KVPolicyManager(
            spec,
            block_pool=self.blocks,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=SIZE,
        )
        self.manager.attach(self.planner, OtherBlocks(), setup.place)
        shape = LAYERS, setup.num_blocks, HEADS, SIZE, 2 * DIM
        self.caches = list(torch.full(shape, POISON))
        self.pool = PagePool(self.caches, setup.columns)
        self.requests = RequestTable(MOST_LIVE, LONGEST, SIZE, CPU)
        counters: Any = SimpleNamespace(
            add_events=lambda *given: None, add_tokens=lambda *given: None
        )
        self.runtime = KVPolicyRuntime(self._compactor(), counters)
        self.live: dict[str, Live] = {}
        self.late: list[tuple[int, UsedBlocks]] = []
        self.gone: set[str] = set()
        self.totals: Counter[str] = Counter()

    def _compactor(self) -> Compactor:
        sizes = MOST_LIVE, LONGEST // SIZE + 2
        return Compactor(
            policies={"scripted": self.setup.policy},
            pool=self.pool,
            tier=make_tier(self.setup.is_ragged, self.requests, self.pool, *sizes),
            requests=self.requests,
            captures=[],
            memory=SurvivorMemory(
                (POSITIONS, "another policy's", MARK),
                self.requests,
                self.setup.num_blocks,
                NUM_HEADS,
                RECENT + SIZE - 1,
            ),
            rope=None,
            scale=1.0,
            most_tokens={"scripted": self.setup.room},
        )

    # -- the scheduler's half ---------------------------------------------------

    def run(self, num_steps: int) -> Counter[str]:
        """Take steps of random traffic, then end all requests."""
        for _ in range(num_steps):
            self._step()
        for name in list(self.live):
            self._end(name)
        for _, used in self.late:
            self.manager.give_back_surplus(used)
        assert self.blocks.get_num_free_blocks() == self.setup.num_blocks - 1
        assert self.planner.num_global_blocks == 0
        return self.totals

    def _step(self) -> None:
        rng = self.rng
        if len(self.live) < MOST_LIVE and rng.random() < 0.4:
            self._start()
        counts: dict[str, int] = {}
        for name in rng.sample(list(self.live), len(self.live)):
            self._schedule(name, counts)
        answers = self._execute(self.planner.finish_step(counts))
        for name, count in counts.items():
            self._write(name, count)
        self.totals["steps"] += 1
        step = self.totals["steps"]
        self.late += [(step + rng.randint(0, self.setup.latest), a) for a in answers]
        for due, used in [item for item in self.late if item[0] <= step]:
            self._answer(used)
            self.late.remove((due, used))
        self._check_blocks()
        self._check_batch(counts)
        for name in list(self.live):
            if self.live[name].computed == self.live[name].last or rng.random() < 0.01:
                self._end(name)
                self.totals["finished"] += 1

    def _start(self) -> None:
        rng = self.rng
        self.totals["started"] += 1
        name = f"r{self.totals['started']}"
        budget = BUDGET + rng.choice((0, 0, 5))
        plan = EventPlan(rng.randint(1, 90), budget, rng.choice((3, 6, 11)), 3 * SIZE)
        bounded = rng.random() < 0.9
        self.live[name] = Live(
            number=self.totals["started"],
            last=rng.randint(40, LONGEST if bounded else 80),
            plan=plan if bounded else None,
            sinks=rng.choice((0, 2, 9)),
        )
        if bounded:
            footprint = Footprint(plan, RECENT, SIZE, self.setup.moves)
            asked = RequestPlan("scripted", footprint, self.live[name].sinks)
            self.planner.add(name, asked)

    def _schedule(self, name: str, counts: dict[str, int]) -> None:
        """Play vLLM's `allocate_slots`: preempt others until there is room."""
        if name not in self.live:
            return
        state, rng = self.live[name], self.rng
        wanted = min(rng.choice((1, 1, 1, 4, 30)), state.last - state.computed)
        count = self.planner.clip(name, state.computed, wanted)
        if not count:
            return
        self.manager.remove_skipped_blocks(name, state.computed)
        end = state.computed + count
        while self._needed(name, end) > self.blocks.get_num_free_blocks():
            if not state.computed:
                return
            victim = [other for other in self.live if self.live[other].computed][-1]
            self._preempt(victim)
            counts.pop(victim, None)
            if victim == name:
                return
        self.manager.allocate_new_blocks(name, end, end)
        counts[name] = count

    def _needed(self, name: str, end: int) -> int:
        start = self.live[name].computed
        return self.manager.get_num_blocks_to_allocate(name, end, (), start, start, end)

    def _preempt(self, name: str) -> None:
        self.totals["preempted"] += 1
        old = self.live[name]
        self.manager.free(name)
        self.planner.restart(name)
        self.live[name] = Live(old.number, old.last, old.plan, old.sinks)
        self.gone.add(name)

    def _end(self, name: str) -> None:
        self.manager.free(name)
        self.planner.remove(name)
        del self.live[name]
        self.gone.add(name)

    def _answer(self, used: UsedBlocks) -> None:
        before = self.blocks.get_num_free_blocks()
        self.manager.give_back_surplus(used)
        self.totals["answers"] += 1
        self.totals["given back"] += self.blocks.get_num_free_blocks() - before

    # -- the worker's half ------------------------------------------------------

    def _execute(self, commands: StepCommands) -> Sequence[UsedBlocks]:
        """Run a step's events and learn from the policy what should be left."""
        events = commands.events
        self.totals["events"] += len(events)
        self.totals["crowded steps"] += len(events) > 1
        seen = getattr(self.setup.policy, "seen", [])
        seen.clear()
        self.runtime.begin(commands, self.gone)
        self.gone, answers = set(), self.runtime.take_answers()
        notes = {note.request: note for note in seen}
        for event in events:
            self._expect(event, notes.get(self.live[event.request_id].number))
        return answers() if answers is not None else ()

    def _expect(self, event: CompactEvent, note: Seen | None) -> None:
        """Follow one event; `note` is what the policy saw of it."""
        state = self.live[event.request_id]
        held = [state.held(head) for head in range(NUM_HEADS)]
        frontier = event.frontier_blocks * SIZE
        assert event.position == state.computed
        if note is not None:
            check_seen(state, note, frontier)
        num_local = state.computed - frontier
        if self.setup.moves:
            state.kept = [row[: len(row) - num_local] for row in held]
        else:
            assert note is not None, "the policy was not asked"
            rules = Rules(
                block_size=SIZE,
                is_ragged=self.setup.is_ragged,
                is_dynamic=self.setup.policy.dynamic,
            )
            made = note.decision
            parts = map(note.heads, (made.keep, note.inputs.must_keep, made.score))
            pages = [(len(row) - num_local) // SIZE for row in held]
            chosen = Chosen(*(part.tolist() for part in parts))
            num_dest = len(event.dest_blocks)
            left = survivors(rules, chosen, pages, state.sinks, num_dest)
            for head, tokens in enumerate(left):
                state.keep(head, tokens, note)
            self.totals["merged tokens"] += sum(
                float(p) != p_old for row in state.mixed for p_old, p in row.items()
            )
        self.totals["uneven events"] += len(set(map(len, state.kept))) > 1
        self.totals["events without survivors of a head"] += [] in state.kept
        state.frontier, state.last_event = frontier, state.computed

    def _write(self, name: str, count: int) -> None:
        """Write a step's tokens where vLLM's slot mapping puts them."""
        state = self.live[name]
        row = self.manager.req_to_blocks[name]
        positions = range(state.computed, state.computed + count)
        state.computed += count
        blocks = torch.tensor([row[p // SIZE].block_id for p in positions])
        offsets = torch.tensor([p % SIZE for p in positions])
        for head in range(NUM_HEADS):
            # [B, N, 2D] pages of this head, seen as the kernels write them.
            pages = self.caches[head // HEADS][:, head % HEADS]
            keys = state.codes(head, positions)
            if not self.setup.columns:
                pages[blocks, offsets] = torch.cat([keys, -keys], dim=-1)
                continue
            halves = pages.view(-1, 2, SIZE * DIM)
            halves[:, 0].view(-1, DIM, SIZE)[blocks, :, offsets] = keys
            halves[:, 1].view(-1, SIZE, DIM)[blocks, offsets] = -keys

    # -- checks -----------------------------------------------------------------

    def _check_blocks(self) -> None:
        """Every superblock is one request's or nobody's; poison what is nobody's."""
        rows: Mapping[str, Any] = self.manager.req_to_blocks
        owned = [block.block_id for row in rows.values() for block in row]
        owned = [block for block in owned if block]
        assert len(owned) == len(set(owned)), "a superblock has two owners"
        num_free = self.blocks.get_num_free_blocks()
        assert len(owned) + num_free == self.setup.num_blocks - 1, "blocks are lost"
        nobodys = sorted(set(range(self.setup.num_blocks)) - set(owned))
        for cache in self.caches:
            assert (cache[0] == POISON).all(), "something wrote to the null block"
            cache[nobodys] = POISON

    def _check_batch(self, counts: Mapping[str, int]) -> None:
        """Compare what attention reads of all requests with what should be there."""
        names = [name for name, state in self.live.items() if state.computed]
        if not names:
            return
        rows = [[b.block_id for b in self.manager.req_to_blocks[n]] for n in names]
        width = max(map(len, rows)) + 1
        padded = [row + [0] * (width - len(row)) for row in rows]
        ends = torch.tensor([self.live[name].computed for name in names]).int()
        self.runtime.batch_request_ids = lambda: names
        queries = torch.tensor([counts.get(name, 1) for name in names])
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
        found = self.runtime.build(
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=ends,
                seq_lens_cpu_upper_bound=ends,
                num_reqs=len(names),
                num_actual_tokens=int(starts[-1]),
                max_query_len=int(queries.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=torch.tensor(padded, dtype=torch.int32),
                slot_mapping=torch.empty(0),
            )
        )
        self.runtime.end()
        if found.folded is not None:
            tables = found.folded.tables.unflatten(1, (-1, HEADS))
            lengths = found.folded.lengths.unflatten(1, (-1, HEADS))
        else:  # what stock attention reads
            common = found.common
            pages = self.pool.own_pages(common.block_table_tensor.long())
            tables = pages.transpose(0, 1)
            lengths = common.seq_lens[:, None].expand(LAYERS, len(names), HEADS)
        for index, name in enumerate(names):
            pages, sizes = tables[:, index].flatten(0, 1), lengths[:, index].flatten()
            self._check_request(name, set(rows[index]), pages, sizes.tolist())

    def _check_request(
        self, name: str, row: set[int], pages: torch.Tensor, lengths: list[int]
    ) -> None:
        """Compare a request's page lists [n, P] with what each head should hold."""
        state = self.live[name]
        taken: list[int] = []
        for head, length in enumerate(lengths):
            layer, expected = head // HEADS, state.held(head)
            assert is_ascending(expected) and length == len(expected), (name, head)
            mine = pages[head, : -(-length // SIZE)]
            taken += mine.tolist()
            keys, values = (
                part[layer][mine].flatten(0, 1)[:length]
                for part in (self.pool.keys, self.pool.values)
            )
            if self.setup.moves:
                order = keys[:, 2].argsort()
                keys, values = keys[order], values[order]
            want = state.codes(head, expected)
            assert same(keys, want), (name, head, keys.tolist(), expected)
            assert same(values, -want), (name, head)
        assert len(set(taken)) == len(taken), "a page has two owners"
        blocks = {page // HEADS % self.setup.num_blocks for page in taken}
        assert blocks <= row - {0}, "a page of somebody else's superblock"
