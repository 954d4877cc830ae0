"""Warm-up: runs dummy events so that Triton compiles before the first request.

Triton compiles a kernel when it first meets sizes of a kind; these events have sizes of
every kind that real ones have. They run while the KV cache is still empty.

They also show that the device has memory for the temporary tensors of an event. Service
batches no more events than have as many tokens as a batch here, see
`DummyEvents.most_tokens`, or fewer where memory is short.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import PRESSURE
from vllm_kvpolicy.events import LAST_PHASE
from vllm_kvpolicy.hints import NO_HINTS, Hints
from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.runtime import KVPolicyRuntime

NAMES = ("warm-up 0", "warm-up 1")  # of the requests
NUM_EVENTS = 2  # of each: the first, and one that finds survivors


def warm_up(runtime: KVPolicyRuntime, dummies: "DummyEvents") -> None:
    """Run dummy events, and the other kernels of a step.

    Raises:
        ValueError: the device has no memory for the temporary tensors of an event.
    """
    untraced = replace(runtime.compactor, trace=None, live=None)
    for events in dummies.steps():
        try:
            untraced.run(events)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"--kv-policy {events[0].policy}: no memory for the temporary tensors "
                f"of an event at {events[0].position} tokens; lower "
                "--gpu-memory-utilization, --kv-budget or prefill_interval"
            ) from error
    runtime.requests.drop(NAMES)
    runtime.tier.warm_up(-(-dummies.max_model_len // dummies.block_size))
    for capture in runtime.captures:
        capture.drop(NAMES)
        capture.warm_up()


@dataclass(frozen=True)
class DummyEvents:
    """The dummy events of a server.

    Args:
        most: requests at once.
        num_blocks: superblocks of the pool, vLLM's null block included.
        query_rows: rows of a superblock that a query takes.
    """

    config: KVPolicyConfig
    most: int
    block_size: int
    num_blocks: int
    max_model_len: int
    query_rows: int

    def steps(self) -> Iterator[list[CompactEvent]]:
        """Yield the events of each step, for every policy.

        Those of requests with a prompt of one token, in the first phase and in the
        last, alone and two at once, and of single ones with prompts of
        `prompt_lengths`, as far as they have events and the pool holds them.
        """
        prompts = [(1, 0), (1, LAST_PHASE)]
        prompts += [(tokens, 0) for tokens in self.prompt_lengths()]
        for policy in self.config.policies:
            for prompt_tokens, phase in prompts:
                if phase and not self.config.spread_events:
                    continue
                events = self.first(policy, prompt_tokens, phase)
                # Every request has blocks of its own, and none has the null block.
                size = self.block_size
                held = -(-events[-1].position // size) if events else self.num_blocks
                room = (self.num_blocks - 1) // held
                # Two long prompts at once would take more memory than service does.
                at_once = len(NAMES) if prompt_tokens == 1 else 1
                for count in range(1, min(self.most, at_once, room) + 1):
                    for event in events:
                        yield [_moved(event, n, n * held) for n in range(count)]

    def most_tokens(self) -> dict[str, int]:
        """Return the most tokens per KV head of a batch of events, by policy.

        A batch is padded to its longest event. Of heads of different lengths, the
        tokens are the mean.
        """
        found: dict[str, int] = {}
        for events in self.steps():
            event = events[0]  # the others are alike
            tokens = len(event.source_blocks) * self.block_size
            tokens += event.local_tokens(self.block_size)
            found[event.policy] = max(found.get(event.policy, 0), len(events) * tokens)
        return found

    def prompt_lengths(self) -> list[int]:
        """Return prompts whose events hold all numbers that kernels tell apart.

        Kernels are made for powers of two: of tokens, and of numbers that grow with
        them. So lengths grow by half, up to the most that an event inside a prompt can
        hold, and the longest prompt comes last.
        """
        config, longest = self.config, self.max_model_len - 1
        most = config.budget_tokens + 2 * config.prefill_step(self.block_size)
        if config.events == PRESSURE:
            most = longest
        tokens = config.smallest_budget(self.block_size) + config.interval_tokens
        lengths = list[int]()
        while tokens < min(most, longest):
            lengths.append(tokens)
            tokens += tokens // 2
        return [*lengths, longest]

    def first(self, policy: str, prompt_tokens: int, phase: int) -> list[CompactEvent]:
        """Return the first events of a request whose superblocks are 1, 2, 3, ..."""
        asked = self.config.with_request({"kv_policy": policy})
        assert asked is not None  # the name is one of the server's
        footprint = asked.footprint(
            prompt_tokens, self.block_size, self.query_rows, phase
        )
        tokens, pins = asked.pinned_tokens(prompt_tokens), footprint.pinned
        events: list[CompactEvent] = []
        held: tuple[int, ...] = ()
        pinned = tuple(range(1, 1 + pins))
        pinned_tokens = pins * self.block_size
        position, frontier = footprint.events.next_event(0), pins
        while position < self.max_model_len and len(events) < NUM_EVENTS:
            row = range(1, 1 + -(-position // self.block_size))
            leaving = tuple(row[frontier : footprint.frontier_blocks(position)])
            frontier = footprint.frontier_blocks(position)
            events.append(
                CompactEvent(
                    request_id=NAMES[0],
                    serial=-1,
                    policy=policy,
                    ordinal=len(events),
                    position=position,
                    frontier_blocks=frontier,
                    budget=footprint.events.budget - pinned_tokens,
                    sinks=max(max(asked.sink_tokens, tokens) - pinned_tokens, 0),
                    prompt_tokens=prompt_tokens,
                    num_global=len(held),
                    source_blocks=held + leaving,
                    dest_blocks=(held + leaving)[
                        : footprint.global_blocks(position) - pins
                    ],
                    local_blocks=tuple(row[frontier:]),
                    pinned_blocks=pinned,
                    window_blocks=(0,) * footprint.window_blocks,
                    hints=Hints(keep=((0, 1),)) if asked.hints else NO_HINTS,
                )
            )
            held = events[-1].dest_blocks
            position = footprint.events.next_event(position + 1)
        return events


def _moved(event: CompactEvent, number: int, distance: int) -> CompactEvent:
    """Return the same event of another request, its superblocks `distance` higher."""
    names = "source_blocks", "dest_blocks", "local_blocks", "pinned_blocks"
    blocks: dict[str, Any] = {
        name: tuple(block + distance for block in getattr(event, name))
        for name in names
    }
    return replace(event, request_id=NAMES[number], **blocks)
