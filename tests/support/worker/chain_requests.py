"""Requests of a chain and what their tokens look like."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from support.worker.chain_policy import Seen, mark
from vllm_kvpolicy.events import EventPlan

LAYERS, HEADS, SIZE, DIM = 2, 3, 4, 4
NUM_HEADS = LAYERS * HEADS


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

    def held(self, head: int) -> list[int]:
        """Return the positions that a head holds, oldest first."""
        return self.kept[head] + list(range(self.frontier, self.computed))


def codes(number: int, head: int, positions: Sequence[int]) -> torch.Tensor:
    """Return [T, D] keys of one head's tokens; values are their negative."""
    return torch.tensor([[number, head, p, 1] for p in positions]).view(-1, DIM).float()


def check_seen(state: Live, note: Seen, frontier: int) -> None:
    """Compare what a policy saw with what the request held."""
    assert state.plan is not None
    assert (note.end, note.budget) == (state.computed, state.plan.budget)
    for head, length in enumerate(note.lengths):
        held = state.held(head)
        assert length == len(held)
        assert note.positions[head, :length].tolist() == held
        want = codes(state.number, head, held)
        assert torch.equal(note.keys[head, :length], want)
        assert torch.equal(note.values[head, :length], -want)
        must = [p < state.sinks or p >= frontier for p in held]
        padding = note.must_keep.shape[-1] - length
        assert note.must_keep[head].tolist() == must + [False] * padding
        marks = [
            mark(state.last_event, head, p) if p < state.last_event else 0 for p in held
        ]
        assert note.marks[head, :length].tolist() == marks
