"""What the scheduler tells the workers each step: frozen, picklable, plain integers.

Built by scheduler, read by worker; travels on vLLM's own SchedulerOutput, so that an
event runs before the forward pass whose `schedule()` freed its superblocks.
Process: any
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class CompactEvent:
    """One event of one request, in superblock ids.

    Args:
        request_id: vLLM's request id.
        ordinal: 0 for the request's first event, counting again after a preemption.
        position: p, tokens computed before this step.
        frontier_blocks: the new F / N; tokens at and above F are local.
        budget: K in tokens, protected prompt included.
        sinks: first tokens that are always kept, protected prompt included.
        source_blocks: superblocks of all tokens below F, in time order.
        dest_blocks: superblocks that hold the survivors afterwards, in time order;
            may share blocks with `source_blocks` or not.
        local_blocks: superblocks of the tokens at and above F.
        window_slot: slot with the newest queries, -1 where the policy needs none.
    """

    request_id: str
    ordinal: int
    position: int
    frontier_blocks: int
    budget: int
    sinks: int
    source_blocks: tuple[int, ...]
    dest_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    window_slot: int


@dataclass(frozen=True)
class WindowCapture:
    """Save queries of this step's forward pass into a window slot.

    Args:
        request_id: vLLM's request id.
        window_slot: destination slot.
        first_token: offset among the request's tokens of this step.
        first_row: row of the window that the first of them fills.
        num_tokens: how many to save.
    """

    request_id: str
    window_slot: int
    first_token: int
    first_row: int
    num_tokens: int


@dataclass(frozen=True)
class StepCommands:
    """Everything the workers of one step need beyond vLLM's own output.

    Events are listed in the order in which their blocks were freed: a block freed by
    one event may be a destination only of a later one.
    """

    events: tuple[CompactEvent, ...]
    captures: tuple[WindowCapture, ...]


NO_COMMANDS = StepCommands(events=(), captures=())
