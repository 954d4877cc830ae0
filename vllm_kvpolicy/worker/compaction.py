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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.ranking import ascending_indices, resize
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import EventInputs, Needs, Policy
from vllm_kvpolicy.policies.testing import MovementPolicy
from vllm_kvpolicy.protocol import CompactEvent, UsedBlocks
from vllm_kvpolicy.worker.batch import Batch, Choice, Placement, move_slots
from vllm_kvpolicy.worker.captures.base import Capture
from vllm_kvpolicy.worker.merging import merge_dropped
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.request_table import RequestTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.base import Tier
from vllm_kvpolicy.worker.trace import NoTrace
from vllm_kvpolicy.worker.transfer import HostCopy

POSITIONS = "positions"  # name under which true positions are remembered


@dataclass(frozen=True)
class EventAnswer:
    """How many pages some requests held and hold, on its way to the host.

    Args:
        events: the events.
        counts: [2, E] pages of all layers and heads that what was held below the new
            frontier took, and that its survivors take.
        num_heads: pages in a superblock.
    """

    events: Sequence[CompactEvent]
    counts: HostCopy
    num_heads: int

    def read(self) -> list[tuple[CompactEvent, int, UsedBlocks]]:
        """Wait for it; return each event, the superblocks held, and the answer."""
        counts, found = (map(int, row) for row in self.counts.read()), []
        for event, held, used in zip(self.events, *counts, strict=True):
            blocks = -(-used // self.num_heads)
            slack = blocks - used / self.num_heads
            answer = UsedBlocks(event.request_id, event.serial, blocks, slack)
            found.append((event, -(-held // self.num_heads), answer))
        return found


@dataclass(frozen=True)
class Compactor:
    """Carries out events on the pages of one KV cache group.

    Args:
        policies: by name, each decides which tokens survive.
        pool: the group's keys and values.
        tier: lays out survivors.
        requests: updated after each event.
        captures: what the forward pass showed.
        memory: by name, what policies remember of survivors, true positions included.
        rope: the model's rotary embedding, None where no policy asks for it.
        scale: softmax scale of the model's attention.
        trace: records survivors with true positions.
    """

    policies: Mapping[str, Policy]
    pool: PagePool
    tier: Tier
    requests: RequestTable
    captures: Sequence[Capture]
    memory: Mapping[str, SurvivorMemory]
    rope: Rope | None
    scale: float
    trace: NoTrace = NoTrace()

    def run(self, events: Sequence[CompactEvent]) -> list[EventAnswer]:
        """Carry out a step's events.

        Events are batched where policy, budget and number of destination blocks agree.
        Batches keep the order of the message, in which a block is freed before it is
        taken.

        Returns:
            What the scheduler has to hear, where the policy may leave some of the
            destinations empty.
        """
        batches: list[list[CompactEvent]] = []
        for event in events:
            if batches and _kind(batches[-1][0]) == _kind(event):
                batches[-1].append(event)
            else:
                batches.append([event])
        return [answer for batch in batches for answer in self._run_batch(batch)]

    def _run_batch(self, events: Sequence[CompactEvent]) -> list[EventAnswer]:
        batch = self._open(events)
        choice = self._decide(batch)
        placement = self._place(batch, choice)
        self._move(batch, choice, placement)
        return self._commit(batch, choice, placement)

    # -- open --------------------------------------------------------------------------

    def _open(self, events: Sequence[CompactEvent]) -> Batch:
        """Find the requests' rows and pages; first events find theirs empty."""
        rows = [self.requests.take(event.request_id) for event in events]
        pairs = zip(rows, events, strict=True)
        fresh = [row for row, event in pairs if not event.ordinal]
        if fresh:
            index = self.requests.to_device(fresh)
            self.tier.clear(fresh, index)
            for memory in self.memory.values():
                memory.clear(index)
        index = self.requests.to_device(rows)
        held = self.tier.held(events, rows, index)
        return Batch(events, self.policies[events[0].policy], rows, index, held)

    # -- decide ------------------------------------------------------------------------

    def _decide(self, batch: Batch) -> Choice:
        """Ask the policy which tokens survive."""
        inputs = self._inputs(batch)
        decision = batch.policy.decide(inputs, batch.events[0].budget)
        decision = self.trace.annotate(decision, batch.policy.needs, inputs)
        if decision.merge is not None:
            inputs = inputs.copied()
        return Choice(inputs, decision)

    def _inputs(self, batch: Batch) -> EventInputs:
        """Return what the policy of a batch sees."""
        events, held, needs = batch.events, batch.held, batch.policy.needs
        block_size, to_device = self.pool.block_size, self.requests.to_device
        num_global = held.num_pages * block_size
        lengths = num_global + held.num_local[:, None]
        token = torch.arange(held.max_tokens, device=batch.index.device)
        sinks = to_device([event.sinks for event in events])[:, None, None]
        is_local = (token >= num_global[..., None]) & (token < lengths[..., None])
        end = to_device([event.position for event in events])
        shape = (len(events), self.pool.num_layers, self.pool.num_heads)
        names = remembered(needs)
        memory = self._recalled(batch, names)
        optional: dict[str, Any] = {}
        if needs.positions:
            positions = self._positions(memory.pop(POSITIONS), lengths, end, token)
            optional["positions"] = positions.view(*shape, -1)
        for capture in self.captures:
            optional |= capture.read(batch)
        for name, pages in (("keys", self.pool.keys), ("values", self.pool.values)):
            if getattr(needs, name):
                ids = held.pages.view(*shape, -1)
                optional[name] = PagedTokens(pages, ids, held.max_tokens)
        return EventInputs(
            lengths=lengths.view(shape),
            must_keep=((token < sinks) | is_local).view(*shape, -1),
            end=end,
            scale=self.scale,
            rope=self.rope,
            prompt_lengths=to_device([event.prompt_tokens for event in events]),
            memory={name: value.view(*shape, -1) for name, value in memory.items()},
            fresh_tokens=self.requests.fresh_tokens(batch.rows, events),
            **optional,
        )

    def _recalled(self, batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return what is remembered of the held tokens, [E, n, T] float32 by name."""
        first = self.tier.starts(batch.index) * self.pool.block_size
        return {
            name: self.memory[name].read(batch.index, first, batch.held.max_tokens)
            for name in names
        }

    @staticmethod
    def _positions(
        remembered: torch.Tensor,
        lengths: torch.Tensor,
        end: torch.Tensor,
        token: torch.Tensor,
    ) -> torch.Tensor:
        """Return [E, n, T] int64 true positions; `remembered` holds them plus one.

        Tokens since the last event are consecutive up to `end`.
        """
        recent = end[:, None, None] - lengths[..., None] + token
        return torch.where(remembered > 0, remembered.long() - 1, recent)

    # -- place -------------------------------------------------------------------------

    def _place(self, batch: Batch, choice: Choice) -> Placement:
        """Round the choice to whole pages; next-best tokens fill them up."""
        held, decision = batch.held, choice.decision
        block_size = self.pool.block_size
        shape = (*held.num_pages.shape, held.max_tokens)
        token = torch.arange(held.max_tokens, device=held.pages.device)
        is_global = token < (held.num_pages * block_size)[..., None]
        keep = decision.keep.reshape(shape) & is_global
        quota, lists = self.tier.place(batch, keep.sum(-1))
        survives = resize(
            keep.flatten(0, 1),
            decision.score.reshape(shape).flatten(0, 1),
            (choice.inputs.must_keep.view(shape) & is_global).flatten(0, 1),
            is_global.flatten(0, 1),
            (quota * block_size).flatten(),
        )
        survives = survives.view(len(batch.events), -1)
        num_places = lists.pages.shape[-1] * block_size
        sources = ascending_indices(survives, num_places)
        return self._shuffled(batch, Placement(lists, sources, is_ordered=True))

    def _shuffled(self, batch: Batch, placement: Placement) -> Placement:
        """Let a policy that tests the moving of tokens shuffle pages and survivors."""
        policy, lists = batch.policy, placement.lists
        if not isinstance(policy, MovementPolicy):
            return placement
        seeds = [event_seed(event.ordinal, event.position) for event in batch.events]
        seed, groups = self.requests.to_device(seeds), self.pool.num_groups
        pages = lists.pages.unflatten(1, (groups, -1)).flatten(0, 1)
        pages = policy.shuffle_pages(pages, seed.repeat_interleave(groups))
        heads = placement.sources.div(batch.held.max_tokens, rounding_mode="floor")
        return Placement(
            replace(lists, pages=pages.view_as(lists.pages)),
            policy.shuffle(placement.sources, heads, seed),
            is_ordered=False,
        )

    # -- move --------------------------------------------------------------------------

    def _move(self, batch: Batch, choice: Choice, placement: Placement) -> None:
        """Copy survivors to their pages, and merge into them what they take in."""
        block_size, groups = self.pool.block_size, self.pool.num_groups
        lists, sources = placement.lists, placement.sources
        moves = list(move_slots(batch.held, lists, sources, block_size))
        for capture in self.captures:
            capture.move(*moves)
        if not placement.is_ordered:
            moves.append(torch.zeros_like(sources, dtype=torch.bool))
        elif lists.unmoved is not None:
            moves.append(lists.unmoved.repeat_interleave(block_size, dim=-1))
        starts = head_starts(lists.first * block_size, sources.shape[-1], groups)
        for group in range(groups):
            rows = [row.unflatten(1, (groups, -1))[:, group].flatten() for row in moves]
            source, dest, *stays = rows
            for pages in (self.pool.keys[group], self.pool.values[group]):
                compact_pages(pages, source, dest, starts[group], *stays)
        if choice.decision.merge is not None:
            merge_dropped(self.pool, batch.held, placement, choice)

    # -- commit ------------------------------------------------------------------------

    def _commit(
        self, batch: Batch, choice: Choice, placement: Placement
    ) -> list[EventAnswer]:
        """Enter the new pages into the tables and remember values of survivors."""
        self.trace.record(batch, choice.decision, placement)
        self.tier.commit(batch, placement.lists)
        self.requests.update(batch.rows, batch.events)
        self._remember(batch, choice, placement)
        if not batch.policy.dynamic:
            return []
        held, used = batch.held.num_pages.sum(-1), placement.lists.first[:, -1]
        counts = HostCopy(torch.stack([held, used]))
        return [EventAnswer(batch.events, counts, batch.held.pages.shape[1])]

    def _remember(self, batch: Batch, choice: Choice, placement: Placement) -> None:
        """Keep what the policy wants to find again, and true positions."""
        values = dict(choice.decision.memory)
        if batch.policy.needs.positions:
            values[POSITIONS] = choice.inputs.given("positions").float() + 1
        for name, value in values.items():
            self.memory[name].write(
                batch.index,
                value.flatten(1, 2),
                placement.sources,
                batch.held,
                self.pool.block_size,
            )


def head_starts(first: torch.Tensor, num_places: int, groups: int) -> torch.Tensor:
    """Return where each head's survivors start when events are laid end to end.

    Example: one group, M = 8 places per event. Heads of the first event start at
    [0, 2, 5] and end at 7; of the second they start at [0, 1, 3] and end at 8. The
    result is [[0, 2, 5, 7, 8, 9, 11, 16, 16]]: place 7 is a row of padding between the
    events, the second event's row of padding is empty, and the last entry is its end.

    Args:
        first: [E, n + 1] int64, of each event; the last entry is where it ends.
        num_places: M, survivors of an event at most.
        groups: sets of heads that are moved apart, n / groups heads and M / groups
            places each.

    Returns:
        [groups, E * (n / groups + 1) + 1] int64: the heads of an event are followed by
        a row of padding; the last entry is where the last event ends.
    """
    num_events, per_group = len(first), (first.shape[-1] - 1) // groups
    size = num_places // groups
    group = torch.arange(groups, device=first.device)[:, None]
    head = torch.arange(per_group + 1, device=first.device)
    starts = first[:, group * per_group + head] - group * size
    event = torch.arange(num_events, device=first.device)[:, None, None]
    starts = (starts + event * size).transpose(0, 1).flatten(1)
    return torch.nn.functional.pad(starts, (0, 1), value=num_events * size)


def _kind(event: CompactEvent) -> tuple[str, int, int]:
    return event.policy, event.budget, len(event.dest_blocks)


def remembered(needs: Needs) -> tuple[str, ...]:
    """Return the names of the values that the worker remembers of each survivor."""
    return needs.memory + (POSITIONS,) * needs.positions
