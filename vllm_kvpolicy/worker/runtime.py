"""The worker's half of a policy: what happens around each step's forward pass.

The metadata builder and the attention implementation reach it through the attention
layers of their own model, never through a global.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vllm_kvpolicy.observe.metrics import WorkerCounters
from vllm_kvpolicy.protocol import NO_COMMANDS, StepCommands, UsedBlocks
from vllm_kvpolicy.worker.compaction import Compactor
from vllm_kvpolicy.worker.step import Step
from vllm_kvpolicy.worker.tiers.tier import EventAnswer, StepMetadata


class KVPolicyRuntime:
    """Begins, describes, watches and ends the steps of one worker.

    Made by `setup` once there is a KV cache.

    Attributes:
        batch_request_ids: returns the requests of the current batch in row order; set
            by the worker mixin.
    """

    def __init__(self, compactor: Compactor, counters: WorkerCounters) -> None:
        self.compactor, self.counters = compactor, counters
        self.policies, self.requests = compactor.policies, compactor.requests
        self.tier, self.captures = compactor.tier, compactor.captures
        self._answers: list[EventAnswer] = []
        self.batch_request_ids: Callable[[], Sequence[str]] = tuple
        self._commands: StepCommands | None = None
        self._draft: int | None = None  # pass of layers that draft, from 0

    def begin(self, commands: StepCommands, gone: Iterable[str]) -> None:
        """Run the step's events; the forward pass may follow.

        Args:
            gone: requests that finished or were preempted before this step.
        """
        self.end()  # of a step that has sampled nothing
        self.requests.drop(gone)
        for capture in self.captures:
            capture.drop(gone)
        self.tier.forget({event.request_id for event in commands.events}.union(gone))
        if commands.events:
            started = time.perf_counter()
            self._answers += self.compactor.run(commands.events)
            seconds = time.perf_counter() - started
            self.counters.add_events(len(commands.events), seconds)
            # What dynamic policies keep is known when their answers are here.
            self.counters.add_tokens(
                (event, len(event.source_blocks), len(event.dest_blocks))
                for event in commands.events
                if not self.policies[event.policy].dynamic
            )
        self._commands = commands

    def build(self, metadata: Any) -> StepMetadata:
        """Return what the attention of a step reads, and let captures plan for it.

        Args:
            metadata: vLLM's CommonAttentionMetadata of this KV cache group.
        """
        if self._commands is None:
            return self.tier.metadata(Step(metadata, (), NO_COMMANDS, is_real=False))
        step = Step(metadata, self.batch_request_ids(), self._commands)
        for capture in self.captures if self._draft is None else ():
            capture.plan(step)
        return self.tier.metadata(step)

    def draft(self, index: int) -> None:
        """Note that layers which draft run next; metadata of that pass is built then.

        Their first pass, 0, computes the step's own tokens, which captures have planned
        for. Later ones compute drafts, which captures do not see.
        """
        self._draft = index

    def observe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Show captures one layer's new tokens; see `Capture.observe`."""
        for capture in () if self._draft else self.captures:
            capture.observe(layer, query, key, value)

    def end(self) -> None:
        """Collect what the step showed; metadata built later is for no request."""
        for capture in self.captures if self._commands is not None else ():
            capture.end_step()
        self._commands = self._draft = None

    def take_answers(self) -> Callable[[], tuple[UsedBlocks, ...]] | None:
        """Return what the scheduler has to hear of events, once; None for nothing.

        A policy is dynamic if it may leave destination blocks of an event empty. How
        many it fills is on its way to the host: calling what is returned waits for it.
        """
        answers, self._answers = self._answers, []

        def read() -> tuple[UsedBlocks, ...]:
            found = [each for answer in answers for each in answer.read()]
            self.counters.add_tokens(
                (event, held, used.num_blocks) for event, held, used in found
            )
            return tuple(used for _, _, used in found)

        return read if answers else None
