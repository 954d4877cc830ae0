"""Runs the events of a step: read, decide, fill up pages, move, remember."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vllm_kvpolicy.events import event_seed
from vllm_kvpolicy.kernels.assign_pages import PageLists
from vllm_kvpolicy.kernels.compact_pages import compact_pages
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.ranking import ascending_indices, resize
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs, Policy
from vllm_kvpolicy.policies.signals import TokenSignal
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.captures.query_windows import QueryWindows
from vllm_kvpolicy.worker.captures.token_signals import TokenSignals
from vllm_kvpolicy.worker.captures.visible_until import Expiries
from vllm_kvpolicy.worker.merging import merge_dropped
from vllm_kvpolicy.worker.notes import with_attention
from vllm_kvpolicy.worker.pages import PagePool
from vllm_kvpolicy.worker.slots import SlotTable
from vllm_kvpolicy.worker.survivors import SurvivorMemory
from vllm_kvpolicy.worker.tiers.layouts import Held, Layout, head_starts, move_slots
from vllm_kvpolicy.worker.tiers.page_selection import PageSelection
from vllm_kvpolicy.worker.trace import Tracer
from vllm_kvpolicy.worker.transfer import Arriving

POSITIONS = "positions"  # name under which true positions are remembered


@dataclass(frozen=True)
class Answer:
    """How many superblocks some requests held and hold, on its way to the host.

    Args:
        events: the events.
        counts: [2, E] superblocks that what was held below the new frontier took, and
            that its survivors take.
    """

    events: Sequence[CompactEvent]
    counts: Arriving

    def read(self) -> list[tuple[CompactEvent, int, int]]:
        """Wait for it, and return each event with both numbers."""
        held, used = self.counts.read()
        return list(zip(self.events, map(int, held), map(int, used), strict=True))


@dataclass(frozen=True)
class Compactor:
    """Carries out events on the pages of one KV cache group.

    Args:
        policies: by name, each decides which tokens survive.
        pool: the group's keys and values.
        layout: where held tokens lie.
        slots: updated after each event.
        windows: queries that policies asked for.
        memory: by name, what policies remember of survivors, true positions included.
        signals: what tokens showed when they were computed.
        rope: the model's rotary embedding, None where no policy asks for it.
        tracer: records survivors with true positions, None unless asked for.
        scale: softmax scale of the model's attention.
        expiries: what tokens decided when they were computed, None where none do.
        selection: looks at pages anew after an event; None where nothing selects.
    """

    policies: Mapping[str, Policy]
    pool: PagePool
    layout: Layout
    slots: SlotTable
    windows: QueryWindows
    memory: Mapping[str, SurvivorMemory]
    signals: TokenSignals
    rope: Rope | None
    tracer: Tracer | None
    scale: float
    expiries: Expiries | None = None
    selection: PageSelection | None = None

    def run(self, events: Sequence[CompactEvent]) -> list[Answer]:
        """Carry out a step's events.

        Returns:
            What the scheduler has to hear, where the policy may leave some of the
            destinations empty.

        Events are batched where policy, budget and number of destination blocks agree.
        All decisions and sources of a batch are read before its first write. Batches
        keep the order of the message, in which a block is freed before it is taken.
        """
        batches: list[list[CompactEvent]] = []
        for event in events:
            if batches and _kind(batches[-1][0]) == _kind(event):
                batches[-1].append(event)
            else:
                batches.append([event])
        return [answer for batch in batches for answer in self._run_batch(batch)]

    def _run_batch(self, events: Sequence[CompactEvent]) -> list[Answer]:
        slots = self._take_slots(events)
        index = self.slots.to_device(slots)
        held = self.layout.held(events, slots, index)
        fresh_tokens = self.slots.fresh_tokens(slots, events)
        inputs = self._inputs(events, index, held, fresh_tokens)
        policy = self.policies[events[0].policy]
        decision = policy.decide(inputs, events[0].budget)
        lists, sources = self._survivors(events, held, inputs, decision)
        seeds = [event_seed(event.ordinal, event.position) for event in events]
        seed = self.slots.to_device(seeds)
        groups = self.pool.num_groups
        pages = lists.pages.unflatten(1, (groups, -1)).flatten(0, 1)
        pages = policy.arrange_pages(pages, seed.repeat_interleave(groups))
        lists = replace(lists, pages=pages.view_as(lists.pages))
        heads = sources.div(held.max_tokens, rounding_mode="floor")
        placed = policy.arrange(sources, heads, seed)
        if self.tracer is not None:
            decision = with_attention(decision, policy.needs, inputs)
        if decision.merge is not None:
            inputs = inputs.copied()
        self._move(events, held, lists, placed, is_ordered=placed is sources)
        if decision.merge is not None:
            merge_dropped(self.pool, held, lists, placed, inputs, decision.merge)
        if self.tracer is not None:
            self.tracer.record(events, slots, held, lists, decision, placed)
        self.layout.update(slots, index, lists)
        self.slots.update(slots, events)
        if self.selection is not None:
            self.selection.update(slots, events, lists.pages)
        self._remember(index, held, inputs, decision, placed)
        if not policy.dynamic:
            return []
        pages = torch.stack([held.num_pages.sum(-1), lists.first[:, -1]])
        return [Answer(events, Arriving(-(-pages // held.pages.shape[1])))]

    def _take_slots(self, events: Sequence[CompactEvent]) -> list[int]:
        """Return the events' slots; first events find theirs empty."""
        slots = [self.slots.take(event.request_id) for event in events]
        pairs = zip(slots, events, strict=True)
        fresh = [slot for slot, event in pairs if not event.ordinal]
        if fresh:
            index = self.slots.to_device(fresh)
            self.layout.clear(fresh, index)
            for memory in self.memory.values():
                memory.clear(index)
        return slots

    def _inputs(
        self,
        events: Sequence[CompactEvent],
        slots: torch.Tensor,
        held: Held,
        fresh_tokens: int,
    ) -> EventInputs:
        """Return what the policy of these events sees."""
        needs = self.policies[events[0].policy].needs
        block_size, to_device = self.pool.block_size, self.slots.to_device
        num_global = held.num_pages * block_size
        lengths = num_global + held.num_local[:, None]
        token = torch.arange(held.max_tokens, device=slots.device)
        sinks = to_device([event.sinks for event in events])[:, None, None]
        is_local = (token >= num_global[..., None]) & (token < lengths[..., None])
        end = to_device([event.position for event in events])
        shape = (len(events), self.pool.num_layers, self.pool.num_heads)
        pages = held.pages.view(*shape, -1)
        windows = None
        if needs.window_tokens:
            windows = self.windows.read(to_device([e.window_slot for e in events]))
        first = self.layout.first(slots) * block_size
        recalled = {
            name: self.memory[name].read(slots, first, held.max_tokens)
            for name in needs.memory
        }
        positions = None
        if needs.positions:
            old = self.memory[POSITIONS].read(slots, first, held.max_tokens)
            positions = self._positions(old, lengths, end, token).view(*shape, -1)
        return EventInputs(
            lengths=lengths.view(shape),
            must_keep=((token < sinks) | is_local).view(*shape, -1),
            end=end,
            scale=self.scale,
            keys=_paged(self.pool.keys, pages, held, needs.keys),
            values=_paged(self.pool.values, pages, held, needs.values),
            queries=windows,
            positions=positions,
            rope=self.rope,
            signals=self._signals(events, needs),
            prompt_lengths=to_device([event.prompt_tokens for event in events]),
            memory={name: value.view(*shape, -1) for name, value in recalled.items()},
            fresh_tokens=fresh_tokens,
            until=self._until(pages, held, needs),
        )

    def _until(
        self, pages: torch.Tensor, held: Held, needs: Needs
    ) -> torch.Tensor | None:
        if self.expiries is None or not needs.until:
            return None
        return self.expiries.read(pages, held.max_tokens)

    def _signals(
        self, events: Sequence[CompactEvent], needs: Needs
    ) -> dict[TokenSignal, torch.Tensor] | None:
        if not needs.signals:
            return None
        request_ids = [event.request_id for event in events]
        return self.signals.read(request_ids, max(event.position for event in events))

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

    def _survivors(
        self,
        events: Sequence[CompactEvent],
        held: Held,
        inputs: EventInputs,
        decision: Decision,
    ) -> tuple[PageLists, torch.Tensor]:
        """Round the choice to whole pages: fill heads up with their next-best tokens.

        Returns:
            The page lists after the event, and [E, M] int64 head * T + token of the
            survivors in their order, ascending; -1 behind the last.
        """
        block_size = self.pool.block_size
        shape = (*held.num_pages.shape, held.max_tokens)
        token = torch.arange(held.max_tokens, device=held.pages.device)
        is_global = token < (held.num_pages * block_size)[..., None]
        keep = decision.keep.reshape(shape) & is_global
        dynamic = self.policies[events[0].policy].dynamic
        quota = self.layout.quota(events, held, keep.sum(-1), dynamic)
        survives = resize(
            keep.flatten(0, 1),
            decision.score.reshape(shape).flatten(0, 1),
            (inputs.must_keep.view(shape) & is_global).flatten(0, 1),
            is_global.flatten(0, 1),
            (quota * block_size).flatten(),
        )
        lists = self.layout.place(events, held, quota)
        num_survivors = lists.pages.shape[-1] * block_size
        survives = survives.view(len(events), -1)
        return lists, ascending_indices(survives, num_survivors)

    def _move(
        self,
        events: Sequence[CompactEvent],
        held: Held,
        lists: PageLists,
        placed: torch.Tensor,
        is_ordered: bool,
    ) -> None:
        """Copy survivors [E, M] to their pages."""
        block_size, groups = self.pool.block_size, self.pool.num_groups
        moves = list(move_slots(held, lists, placed, block_size))
        if self.expiries is not None:
            self.expiries.move(*moves)
        if not is_ordered:
            moves.append(torch.zeros_like(placed, dtype=torch.bool))
        elif lists.unmoved is not None:
            moves.append(lists.unmoved.repeat_interleave(block_size, dim=-1))
        starts = head_starts(lists.first * block_size, placed.shape[-1], groups)
        for group in range(groups):
            rows = [row.unflatten(1, (groups, -1))[:, group].flatten() for row in moves]
            source, dest, *stays = rows
            for pages in (self.pool.keys[group], self.pool.values[group]):
                compact_pages(pages, source, dest, starts[group], *stays)

    def _remember(
        self,
        slots: torch.Tensor,
        held: Held,
        inputs: EventInputs,
        decision: Decision,
        placed: torch.Tensor,
    ) -> None:
        """Keep what the policy wants to find again, and true positions."""
        values = dict(decision.memory)
        if inputs.positions is not None:
            values[POSITIONS] = inputs.positions.float() + 1
        for name, value in values.items():
            self.memory[name].write(
                slots, value.flatten(1, 2), placed, held, self.pool.block_size
            )


def _paged(
    pools: Sequence[torch.Tensor], pages: torch.Tensor, held: Held, is_read: bool
) -> PagedTokens | None:
    return PagedTokens(pools, pages, held.max_tokens) if is_read else None


def _kind(event: CompactEvent) -> tuple[str, int, int]:
    return event.policy, event.budget, len(event.dest_blocks)
