"""Finds the tokens that requests have given hints about among those that heads hold."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vllm_kvpolicy.protocol import CompactEvent
from vllm_kvpolicy.worker.transfer import Integers

STAYS, GOES_FIRST = 1, 2  # a token is never both


def always_kept(event: CompactEvent, block_size: int) -> int:
    """Return the tokens per KV head below an event's frontier that stay in any case."""
    first = len(event.pinned_blocks) * block_size + event.sinks
    frontier = event.frontier_blocks * block_size
    return event.sinks + event.hints.num_kept(first, frontier)


def hint_numbers(events: Sequence[CompactEvent]) -> dict[str, Integers]:
    """Return where marks of tokens begin and end, for the device; nothing without.

    Returns:
        By name, `hint_edges` [E, M], positions, and `hint_steps` [E, M], what changes
        there. Both are 0 on padding.
    """
    if not any(event.hints for event in events):
        return {}
    edges = [
        [
            (position, sign * mark)
            for mark, ranges in (
                (STAYS, e.hints.keep),
                (GOES_FIRST, e.hints.drop_first),
            )
            for pair in ranges
            for position, sign in zip(pair, (1, -1), strict=True)
        ]
        for e in events
    ]
    table = np.zeros((2, len(events), max(map(len, edges))), np.int64)
    for row, pairs in enumerate(edges):
        table[:, row, : len(pairs)] = [*zip(*pairs, strict=True)] or 0
    return {"hint_edges": table[0], "hint_steps": table[1]}


def hinted(
    sent: Mapping[str, torch.Tensor],
    positions: torch.Tensor,
    lengths: torch.Tensor,
    events: Sequence[CompactEvent],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which held tokens stay, and which do not go first, both [E, n, T] bool.

    Args:
        positions: [E, n, T] int64, true positions; padding has any.
        lengths: [E, n] int64, tokens held.
    """
    end = max(event.position for event in events)
    edges, steps = sent["hint_edges"].clamp(max=end), sent["hint_steps"]
    marks = steps.new_zeros(len(edges), end + 1).scatter_add_(1, edges, steps)
    index = positions.flatten(1).clamp(0, end)
    mark = marks.cumsum(1).gather(1, index).view_as(positions)
    token = torch.arange(positions.shape[-1], device=positions.device)
    is_held = token < lengths[..., None]
    return is_held & (mark == STAYS), is_held & (mark != GOES_FIRST)
