"""Runs the events of a step: open, decide, place, move, commit.

The order of the five is what makes an event correct:

* open: rows of new requests are emptied before anything of them is read;
* decide and place: everything that a batch reads of the cache and of the tables is read
  before its first write, for all its events: the destinations of one may be the sources
  of another;
* move: values kept by slot and then keys and values, whose old places are lost now;
* commit: page lists and the request table first, then what is remembered of survivors,
  which lies on the superblocks that the request table names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.kernels.compact_pages import (
    Moves,
    compact_pages,
    list_survivors,
    merge_pages,
    survivor_moves,
)
from vllm_kvpolicy.kernels.ranking import must_keep_tokens, resize
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs, Needs, Policy
from vllm_kvpolicy.policies.compose import POSITIONS
from vllm_kvpolicy.policies.ranks import ONE_RANK, Ranks
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.batch import Batch, Choice, Destinations, HeldPages
from vllm_kvpolicy.worker.captures.capture import Capture
from vllm_kvpolicy.worker.hints import hint_numbers, hinted
from vllm_kvpolicy.worker.layers import sink_logits
from vllm_kvpolicy.worker.observers.live import LiveEvents
from vllm_kvpolicy.worker.observers.trace import Tracer, with_attention
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.tier import EventAnswer, Tier
from vllm_kvpolicy.worker.transfer import Integers, to_device_together


def merge_dropped(
    pool: PagePool,
    held: HeldPages,
    destinations: Destinations,
    choice: Choice,
    moves: Moves,
) -> None:
    """Rewrite keys and values of the survivors whose partner is gone.

    A partner that was kept after all, to fill a page, is not merged.

    Args:
        pool: the group's keys and values, mutated.
        choice: the policy's pairs, and keys and values from before the move.
    """
    placed, inputs, merge = destinations.sources, choice.inputs, choice.decision.merge
    assert merge is not None
    index = placed.clamp_min(0)
    partner = merge.partner.flatten(1).gather(1, index)
    other = index - index % held.max_tokens + partner.clamp_min(0)
    size = merge.partner[0].numel()
    survives = torch.zeros(len(placed), size + 1, dtype=torch.bool, device=index.device)
    survives = survives.scatter(1, torch.where(placed < 0, size, placed), True)
    is_merged = (placed >= 0) & (partner >= 0) & ~survives.gather(1, other)
    weight = torch.where(is_merged, merge.weight.flatten(1).gather(1, index), 1.0)
    layer = index // (held.max_tokens * pool.num_heads)
    slots, layers = moves.dest.flatten(), layer.flatten()
    for name, pages in (("keys", pool.keys[0]), ("values", pool.values[0])):
        before = inputs.given(name).flatten(1, 3)
        taken = torch.take_along_dim(before, other[..., None], dim=1)
        rows = slots, taken.flatten(0, 1), weight.flatten()
        merge_pages(pages, *rows, pool.scales(name, layers))


logger = init_logger("vllm.kv_policy")


@dataclass(frozen=True)
class Compactor:
    """Carries out events on the pages of one KV cache group.

    Args:
        requests: updated after each event.
        memory: what policies remember of survivors, true positions included.
        layers: vLLM's, whose learned sinks are read as they are at each event; none
            where they have no sinks.
        most_tokens: by policy, most tokens per head of a batch of several events, all
            padded to the longest head among them; temporary tensors grow with that.
            Becomes less where memory is short.
    """

    policies: Mapping[str, Policy]
    pool: PagePool
    tier: Tier
    requests: RequestTable
    captures: Sequence[Capture]
    memory: SurvivorMemory
    rope: Rope | None
    scale: float
    trace: Tracer | None = None
    live: LiveEvents | None = None
    ranks: Ranks = ONE_RANK
    most_tokens: dict[str, int] = field(default_factory=dict)
    layers: Sequence[Any] = ()

    @torch.inference_mode()
    def run(self, events: Sequence[CompactEvent]) -> list[EventAnswer]:
        """Carry out a step's events; return the answers of dynamic policies."""
        batches = self._batches(events)
        return [answer for batch in batches for answer in self._run_batch(batch)]

    def _batches(
        self, events: Sequence[CompactEvent]
    ) -> Iterator[Sequence[CompactEvent]]:
        """Yield neighbours of one policy, budget and number of destination blocks.

        As many as `most_tokens` allows. Batches keep the order of the message, in which
        a block is freed before it is taken.
        """
        start = longest = 0
        for end, event in enumerate(events):
            tokens = self.tier.longest(event)
            longest = max(longest, tokens)
            room = self.most_tokens.get(event.policy, math.inf)
            fits = longest * (end + 1 - start) <= room
            if end > start and not (fits and _kind(events[start]) == _kind(event)):
                yield events[start:end]
                start, longest = end, tokens
        if events:
            yield events[start:]

    def _run_batch(self, events: Sequence[CompactEvent]) -> list[EventAnswer]:
        """Carry out a batch; in halves, one after the other, where memory is short.

        Up to where tokens move, what has been done may be done again; the moves take
        little. Ranks that choose together do not know of each other that one is short.
        """
        batch = choice = None
        try:
            batch = self._open(events)
            choice = self._decide(batch)
            destinations = self._place(batch, choice)
        except torch.OutOfMemoryError:
            if len(events) == 1 or self.ranks is not ONE_RANK:
                raise
            del batch, choice  # and their tensors
            half, policy = len(events) // 2, events[0].policy
            most = max(map(self.tier.longest, events)) * half
            self.most_tokens[policy] = min(most, self.most_tokens.get(policy, most))
        else:
            for capture in self.captures:  # before others get what they lie on
                capture.forget_windows(events)
            self._move(batch, choice, destinations)
            return self._commit(batch, choice, destinations)
        logger.warning(
            "KV policy: no memory for %d events of %s at once; from now on it has "
            "smaller batches",
            len(events),
            policy,
        )
        return [*self._run_batch(events[:half]), *self._run_batch(events[half:])]

    def _open(self, events: Sequence[CompactEvent]) -> Batch:
        """Find the requests' rows and pages; first events find theirs empty."""
        policy = self.policies[events[0].policy]
        rows = [self.requests.take(event.request_id) for event in events]
        pairs = zip(rows, events, strict=True)
        fresh = [row for row, event in pairs if not event.ordinal]
        hints = hint_numbers(events)
        needs = policy.needs | Needs(positions=bool(hints))
        numbers = self._numbers(events, needs) | {"fresh": fresh} | hints
        sent = to_device_together(numbers, self.requests.device)
        if fresh:
            self.tier.clear(fresh, sent["fresh"])
            self.memory.clear(sent["fresh"])
        held = self.tier.held(events, sent)
        return Batch(events, policy, rows, sent, held, needs)

    def _numbers(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[str, Integers]:
        """Return what a batch needs of its events on the device, [E] each of ours."""
        numbers = self.tier.numbers(events) | {
            "end": [event.position for event in events],
            "sinks": [event.sinks for event in events],
            "prompt_tokens": [event.prompt_tokens for event in events],
            "seeds": [event_seed(event.ordinal, event.position) for event in events],
        }
        for capture in self.captures:
            if capture.serves(needs):
                numbers |= capture.numbers(events, needs)
        return numbers

    def _decide(self, batch: Batch) -> Choice:
        """Ask the policy which tokens survive."""
        inputs = self._inputs(batch)
        decision = batch.policy.decide(inputs, batch.events[0].budget)
        if self.trace is not None:
            decision = with_attention(decision, batch.needs, inputs)
        if decision.merge is not None:
            inputs = inputs.copied()
        return Choice(inputs, decision)

    def _inputs(self, batch: Batch) -> EventInputs:
        """Return what the policy of a batch sees."""
        held, needs, sent = batch.held, batch.needs, batch.sent
        block_size, end = self.pool.block_size, sent["end"]
        lengths, must_keep = must_keep_tokens(
            held.num_pages, held.num_local, sent["sinks"], block_size, held.max_tokens
        )
        shape = (len(end), self.pool.num_layers, self.pool.num_heads)
        names = remembered(needs)
        memory: dict[str, torch.Tensor] = {}  # of held tokens, [E, n, T] float32
        if names:
            index, first = batch.sent["rows"], self.tier.starts(batch.sent["rows"])
            values = self.memory.read(names, index, first, held.max_tokens)
            memory = dict(zip(names, values, strict=True))
        optional: dict[str, Any] = {}
        if needs.positions:
            positions = self._positions(memory.pop(POSITIONS), lengths, end)
            optional["positions"] = positions.view(*shape, -1)
            if "hint_edges" in sent:
                stays, others = hinted(sent, positions, lengths, batch.events)
                must_keep |= stays
                optional["candidates"] = (must_keep | others).view(*shape, -1)
        for capture in self.captures:
            if capture.serves(needs):
                optional |= capture.read(batch)
        if "queries" in optional:
            optional["queries"] = self.ranks.queries_of_copies(optional["queries"])
        for name in ("keys", "values"):
            if getattr(needs, name):
                ids = held.pages.view(*shape, -1)
                optional[name] = self.pool.held(name, ids, held.max_tokens)
        return EventInputs(
            lengths=lengths.view(shape),
            must_keep=must_keep.view(*shape, -1),
            end=end,
            scale=self.scale,
            rope=self.rope,
            prompt_lengths=sent["prompt_tokens"],
            memory={name: value.view(*shape, -1) for name, value in memory.items()},
            fresh_tokens=self.requests.fresh_tokens(batch.rows, batch.events),
            ranks=self.ranks,
            sink_logits=sink_logits(self.layers),
            **optional,
        )

    @staticmethod
    def _positions(
        remembered: torch.Tensor, lengths: torch.Tensor, end: torch.Tensor
    ) -> torch.Tensor:
        """Return [E, n, T] int64 true positions; `remembered` holds them plus one.

        Tokens since the last event are consecutive up to `end`.
        """
        token = torch.arange(remembered.shape[-1], device=end.device)
        recent = end[:, None, None] - lengths[..., None] + token
        return torch.where(remembered > 0, remembered.long() - 1, recent)

    def _place(self, batch: Batch, choice: Choice) -> Destinations:
        """Round the choice to whole pages; next-best tokens fill them up."""
        held, decision = batch.held, choice.decision
        block_size = self.pool.block_size
        shape = (*held.num_pages.shape, held.max_tokens)
        keep = decision.keep.reshape(shape)
        quota = self.tier.quota(batch, keep)
        lists = self.tier.assign(batch, quota)
        survives = resize(
            keep,
            decision.score.reshape(shape),
            choice.inputs.must_keep.view(shape),
            held.num_pages,
            quota,
            block_size,
        )
        num_places = lists.pages.shape[-1] * block_size
        sources = list_survivors(survives, lists.first, num_places, block_size)
        if batch.policy.shuffled is not None:
            given = lists.pages, sources, held.max_tokens, batch.sent["seeds"]
            pages, sources = batch.policy.shuffled(*given)
            unmoved = torch.zeros_like(lists.pages, dtype=torch.bool)  # nor in order
            lists = replace(lists, pages=pages, unmoved=unmoved)
        return Destinations(lists, sources)

    def _move(self, batch: Batch, choice: Choice, destinations: Destinations) -> None:
        """Copy survivors to their pages, and merge into them what they take in."""
        held, lists, pool = batch.held, destinations.lists, self.pool
        moves = survivor_moves(
            destinations.sources,
            held.pages,
            lists.first,
            lists.pages,
            lists.unmoved,
            held.max_tokens,
            pool.block_size,
        )
        for capture in self.captures:
            capture.move(moves)
        slots = moves.source.flatten(), moves.dest.flatten()
        stays = None if moves.in_place is None else moves.in_place.flatten()
        for pages in pool.tokens:
            compact_pages(pages, *slots, moves.first, stays)
        if choice.decision.merge is not None:
            merge_dropped(pool, held, destinations, choice, moves)

    def _commit(
        self, batch: Batch, choice: Choice, destinations: Destinations
    ) -> list[EventAnswer]:
        """Enter the new pages into the tables and remember values of survivors."""
        if self.trace is not None:
            self.trace.record(batch, choice.decision, destinations)
        if self.live is not None:
            self.live.tell(batch, destinations)
        answer = self.tier.commit(batch, destinations.lists)
        self.requests.update(batch.rows, batch.events, batch.sent)
        self._remember(batch, choice, destinations)
        return [answer] if answer is not None and batch.policy.dynamic else []

    def _remember(
        self, batch: Batch, choice: Choice, destinations: Destinations
    ) -> None:
        """Keep what the policy wants to find again, and true positions."""
        values = dict(choice.decision.memory)
        if batch.needs.positions:
            values[POSITIONS] = choice.inputs.given("positions").float() + 1
        if not values:
            return
        rows = [value.flatten(1, 2) for value in values.values()]
        stacked = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        names, index = tuple(values), batch.sent["rows"]
        self.memory.write(names, index, stacked, destinations.sources, batch.held)


def _kind(event: CompactEvent) -> tuple[str, int, int]:
    return event.policy, event.budget, len(event.dest_blocks)


def remembered(needs: Needs) -> tuple[str, ...]:
    """Return the names of the values that the worker remembers of each survivor."""
    return needs.memory + (POSITIONS,) * needs.positions
