"""What scheduler and workers tell each other each step: frozen, picklable, numbers.

The scheduler attaches `StepCommands` to vLLM's own SchedulerOutput for the worker, so
that an event runs before the forward pass whose `schedule()` freed its superblocks.
"""

from dataclasses import dataclass

from vllm_kvpolicy.hints import NO_HINTS, Hints


@dataclass(frozen=True)
class CompactEvent:
    """One event of one request, in superblock ids.

    Args:
        serial: number of the event among all of the engine's.
        ordinal: 0 for the request's first event, counting again after a preemption.
        position: p, tokens computed before this step.
        frontier_blocks: the new F / N; tokens at and above F are local.
        budget: tokens per KV head that are kept behind the pinned ones.
        sinks: first tokens behind the pinned ones that are always kept.
        num_global: number of leading `source_blocks` that already hold survivors of the
            previous event; under a dynamic policy the last of them may be empty. The
            others were local until now.
        source_blocks: superblocks of all tokens below F behind the pinned ones, in time
            order.
        dest_blocks: superblocks that hold the survivors afterwards, in time order;
            may share blocks with `source_blocks` or not.
        pinned_blocks: first superblocks of the prompt, which stay as they are and are
            not part of the event; others may use them, too.
        window_blocks: superblocks with the newest queries, which the event gives back,
            so that they may be destinations, too; none where it reads no queries.
    """

    request_id: str
    serial: int
    policy: str
    ordinal: int
    position: int
    frontier_blocks: int
    budget: int
    sinks: int
    prompt_tokens: int
    num_global: int
    source_blocks: tuple[int, ...]
    dest_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    pinned_blocks: tuple[int, ...] = ()
    window_blocks: tuple[int, ...] = ()
    hints: Hints = NO_HINTS

    @property
    def leaving_blocks(self) -> tuple[int, ...]:
        """Superblocks that were local until this event."""
        return self.source_blocks[self.num_global :]

    def local_tokens(self, block_size: int) -> int:
        """Return the tokens at and above F, given N."""
        return self.position - self.frontier_blocks * block_size


@dataclass(frozen=True)
class WindowCapture:
    """Save queries of this step's forward pass into a query window.

    Args:
        first_token: offset among the request's tokens of this step.
        first_row: row of the window that the first of them fills.
        num_tokens: how many to save.
    """

    request_id: str
    window_blocks: tuple[int, ...]
    first_token: int
    first_row: int
    num_tokens: int


@dataclass(frozen=True)
class StepCommands:
    """Everything the workers of one step need beyond vLLM's own output.

    Events, which come before the forward pass, are in the order in which their blocks
    were freed: a block freed by one may be a destination only of a later one.

    Args:
        exempt: requests that attend to every cached token; all others mask dropped
            tokens. Only with `exact`.
    """

    events: tuple[CompactEvent, ...]
    captures: tuple[WindowCapture, ...]
    exempt: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UsedBlocks:
    """A worker's answer to an event: how many of its destinations are in use.

    Args:
        num_blocks: how many leading destination superblocks hold survivors; the others
            are empty.
        slack: how much of those is empty, mean over layers and heads, in superblocks,
            from 0 to less than 1: heads of different lengths need not fill the last.
    """

    request_id: str
    serial: int
    num_blocks: int
    slack: float = 0.0


NO_COMMANDS = StepCommands(events=(), captures=())
