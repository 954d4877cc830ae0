"""A policy that chooses by a hash of the keys it sees, and records them."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs, Merge, Needs, Policy

MARK = "mark"


@dataclass(frozen=True)
class Seen:
    """One event of a batch as the policy saw it, and what it decided."""

    inputs: EventInputs
    budget: int
    decision: Decision
    event: int

    def heads(self, values: torch.Tensor) -> torch.Tensor:
        """Return [n, ...] of this event's [E, L, H, ...]."""
        return values[self.event].flatten(0, 1)

    @property
    def request(self) -> int:
        """The number that the keys of its tokens begin with."""
        return int(self.heads(self.inputs.given("keys"))[0, 0, 0])


def mark(end: int, head: Any, position: Any) -> Any:
    """Return what the policy remembers of tokens, integers or tensors; below 2^24."""
    return (end * 512 + position) * 16 + head


class ScriptedPolicy(Policy):
    """Keeps a random number of random tokens per head; scores have many ties.

    Args:
        is_ragged: heads get different sizes whose mean is the budget.
        dynamic: the mean may be smaller.
        merges: survivors take dropped tokens in.
    """

    needs = Needs(keys=True, values=True, positions=True, memory=(MARK,))

    def __init__(self, is_ragged: bool, dynamic: bool, merges: bool = False) -> None:
        self.is_ragged, self.dynamic, self.merges = is_ragged, dynamic, merges
        self.seen: list[Seen] = []
        self.batches: list[tuple[int, int]] = []  # events, tokens per head

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose, event by event."""
        self.batches.append((len(inputs.end), inputs.must_keep.shape[-1]))
        keep = torch.zeros_like(inputs.must_keep)
        score, marks, weight = torch.zeros(3, *keep.shape)
        partner = torch.full(keep.shape, -1)
        for event, lengths in enumerate(inputs.lengths.flatten(1).tolist()):
            must = inputs.must_keep[event].flatten(0, 1)
            end = int(inputs.end[event])
            rng = Random(f"{inputs.given('keys')[event, 0, 0, 0, 0]} {end}")
            sizes = self._sizes(rng, must.sum(-1).tolist(), lengths, budget)
            kept, scores, partners, weights = (
                part[event].flatten(0, 1) for part in (keep, score, partner, weight)
            )
            for head, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
                pinned = must[head].nonzero().flatten().tolist()
                others = [token for token in range(length) if token not in pinned]
                chosen = rng.sample(others, size - len(pinned))
                kept[head, pinned + chosen] = True
                draws = [float(rng.randrange(4)) for _ in range(length)]
                scores[head, :length] = torch.tensor(draws)
                if self.merges:
                    dropped = [token for token in others if token not in chosen]
                    rng.shuffle(dropped)
                    for token, other in zip(chosen, dropped, strict=False):
                        partners[head, token] = other
                        weights[head, token] = rng.choice((0.25, 0.5, 1.0))
            at = inputs.given("positions")[event].flatten(0, 1)
            head = torch.arange(len(at))[:, None]
            marks[event] = mark(end, head, at).view(marks[event].shape)
        merge = Merge(partner, weight) if self.merges else None
        decision = Decision(keep, score, {MARK: marks}, merge=merge)
        seen = inputs.copied(), budget, decision
        self.seen += [Seen(*seen, event) for event in range(len(inputs.end))]
        return decision

    def _sizes(
        self, rng: Random, least: list[int], most: list[int], budget: int
    ) -> list[int]:
        if not self.is_ragged:
            return [budget] * len(least)
        total = min(budget * len(least), sum(most))
        if self.dynamic:
            total = rng.choice((sum(least), rng.randint(sum(least), total)))
        sizes = list(least)
        weights = [rng.random() ** 3 for _ in least]
        while sum(sizes) < total:
            (head,) = rng.choices(range(len(sizes)), weights)
            sizes[head] = min(sizes[head] + rng.randint(1, 5), most[head])
            weights[head] *= sizes[head] < most[head]
            if sum(sizes) > total:
                sizes[head] -= sum(sizes) - total
        return sizes
