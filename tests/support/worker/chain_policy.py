"""A policy that chooses by a hash of the keys it sees, and records them."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs, Policy

MARK = "mark"


@dataclass(frozen=True)
class Seen:
    """One event as the policy saw it, and what it decided; tensors are [n, T, ...]."""

    request: int
    end: int
    budget: int
    lengths: list[int]
    must_keep: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    marks: torch.Tensor
    keep: torch.Tensor
    score: torch.Tensor


def mark(end: int, head: Any, position: Any) -> Any:
    """Return what the policy remembers of tokens, integers or tensors; below 2^24."""
    return (end * 512 + position) * 16 + head


class ScriptedPolicy(Policy):
    """Keeps a random number of random tokens per head; scores have many ties.

    Args:
        is_ragged: heads get different sizes whose mean is the budget.
        dynamic: the mean may be smaller.
    """

    needs = Needs(keys=True, values=True, positions=True, memory=(MARK,))

    def __init__(self, is_ragged: bool, dynamic: bool) -> None:
        self.is_ragged, self.dynamic = is_ragged, dynamic
        self.seen: list[Seen] = []
        self.batches: list[tuple[int, int]] = []  # events, tokens per head

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose, event by event."""
        self.batches.append((len(inputs.end), inputs.must_keep.shape[-1]))
        keep = torch.zeros_like(inputs.must_keep)
        score = torch.zeros(keep.shape)
        marks = torch.zeros(keep.shape)
        for event, lengths in enumerate(inputs.lengths.flatten(1).tolist()):
            must = inputs.must_keep[event].flatten(0, 1)
            end = int(inputs.end[event])
            rng = Random(f"{inputs.given('keys')[event, 0, 0, 0, 0]} {end}")
            sizes = self._sizes(rng, must.sum(-1).tolist(), lengths, budget)
            kept, scores = keep[event].flatten(0, 1), score[event].flatten(0, 1)
            for head, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
                pinned = must[head].nonzero().flatten().tolist()
                others = [token for token in range(length) if token not in pinned]
                kept[head, pinned + rng.sample(others, size - len(pinned))] = True
                draws = [float(rng.randrange(4)) for _ in range(length)]
                scores[head, :length] = torch.tensor(draws)
            at = inputs.given("positions")[event].flatten(0, 1)
            head = torch.arange(len(at))[:, None]
            marks[event] = mark(end, head, at).view(marks[event].shape)
            self._note(inputs, event, budget, lengths, kept, scores)
        return Decision(keep, score, {MARK: marks})

    def _sizes(
        self, rng: Random, least: list[int], most: list[int], budget: int
    ) -> list[int]:
        """Return tokens per head."""
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

    def _note(
        self,
        inputs: EventInputs,
        event: int,
        budget: int,
        lengths: list[int],
        keep: torch.Tensor,
        score: torch.Tensor,
    ) -> None:
        keys = inputs.given("keys")[event].flatten(0, 1).clone()
        self.seen.append(
            Seen(
                request=int(keys[0, 0, 0]),
                end=int(inputs.end[event]),
                budget=budget,
                lengths=lengths,
                must_keep=inputs.must_keep[event].flatten(0, 1).clone(),
                keys=keys,
                values=inputs.given("values")[event].flatten(0, 1).clone(),
                positions=inputs.given("positions")[event].flatten(0, 1).clone(),
                marks=inputs.memory[MARK][event].flatten(0, 1).clone(),
                keep=keep.clone(),
                score=score.clone(),
            )
        )
