"""Admission: tokens that a learned gate refuses leave the cache with the recent window.

A token's gate is evaluated once, while it is computed or at the first event after that,
and remembered for as long as the token is held. Admission alone has no budget; an
eviction after it chooses among the admitted tokens.

Source: WG-KV (arXiv 2512.17452) sections 3.2 and 3.3; the eviction of its appendix K.1
is `trim-snapmax`. Deviations: tokens leave the window at events, not one by one; heads
are filled up to whole pages with refused tokens, best first, which the next event may
drop.
"""

from dataclasses import replace
from typing import cast

import torch

from vllm_kvpolicy.kernels.visibility import NEVER
from vllm_kvpolicy.policies.base import Decider, Decision, EventInputs, Needs, Policy
from vllm_kvpolicy.policies.ranks import HeadShard

MEMORY = "admission"
LEAST = 2.0**-126  # stands for a gate of 0 in memory, where 0 means not evaluated


class BaseAdmission:
    """Predicts how useful a token will be after it leaves the window.

    A subclass either defines `gates`, or sets `needs.until` and implements `Decider`;
    its decisions then act as gates of 0 or 1.

    Attributes:
        needs: what `gates` reads.
        threshold: tokens with a gate above this are admitted.
    """

    needs = Needs()
    threshold = 0.5

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check at start-up that the admission can serve the model.

        Args:
            num_layers: L, attention layers.
            num_heads: Hq, query heads per layer, of all ranks.
            num_kv_heads: H, KV heads per layer, of all ranks.
            head_dim: D, channels per head.

        Raises:
            ValueError: it was trained for a model of another shape.
        """

    def take_heads(self, shard: HeadShard) -> None:
        """Serve some of the model's heads; once, after `check_model`."""

    def gates(self, inputs: EventInputs, token: torch.Tensor) -> torch.Tensor:
        """Evaluate the gates of some tokens.

        Args:
            inputs: the event.
            token: [E, L, H, F] int64, held tokens, by their places in the rows.

        Returns:
            [E, L, H, F] float32 between 0 and 1.
        """
        raise NotImplementedError


class AdmittedPolicy(Policy):
    """Keeps the admitted tokens, or those that an eviction chooses among them.

    Args:
        admission: the gates.
        eviction: chooses within the budget; None for no budget.
    """

    dynamic = True

    def __init__(self, admission: BaseAdmission, eviction: Policy | None) -> None:
        self.admission, self.eviction = admission, eviction
        self.needs = admission.needs
        if not self.needs.until:
            self.needs |= Needs(memory=(MEMORY,))
        if eviction is not None:
            self.needs |= eviction.needs

    @property
    def decider(self) -> Decider | None:
        """What decides while tokens are computed; None where gates wait for events."""
        return cast(Decider, self.admission) if self.needs.until else None

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check both parts at start-up; see `Policy`."""
        for part in (self.admission, self.eviction):
            if part is not None:
                part.check_model(num_layers, num_heads, num_kv_heads, head_dim)

    def take_heads(self, shard: HeadShard) -> None:
        """Serve some of the model's heads with both parts; see `Policy`."""
        for part in (self.admission, self.eviction):
            if part is not None:
                part.take_heads(shard)

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep admitted and must-keep tokens; at most `budget` where there is one."""
        gates = self._gates(inputs)
        is_useful = gates > self.admission.threshold
        admitted = inputs.valid & (inputs.must_keep | is_useful)
        memory = {} if self.needs.until else {MEMORY: gates}
        notes = {"gates": gates}
        if self.eviction is None:
            return Decision(admitted, gates, memory, notes)
        chosen = self.eviction.decide(replace(inputs, candidates=admitted), budget)
        # Refused tokens fill up pages after all others, best gates first.
        lowest = torch.finfo(gates.dtype).min
        return replace(
            chosen,
            score=torch.where(admitted, chosen.score / 2, lowest * (1 - gates / 4)),
            memory={**chosen.memory, **memory},
            notes={**chosen.notes, **notes},
        )

    def _gates(self, inputs: EventInputs) -> torch.Tensor:
        """Return [E, L, H, T] float32 gates, new tokens' evaluated, others' remembered.

        What is remembered comes first in a row: survivors, then local tokens of the
        last event. A row that has fewer new tokens than another one also evaluates
        some of its padding, whose gates nobody reads. Decisions made while tokens were
        computed are remembered along with the tokens.
        """
        if self.needs.until:
            return (inputs.given("until") == NEVER).float()
        known = inputs.memory[MEMORY]
        fresh = torch.arange(inputs.fresh_tokens, device=known.device)
        token = (known > 0).sum(-1, keepdim=True) + fresh
        token = torch.minimum(token, inputs.lengths[..., None] - 1)
        gates = self.admission.gates(inputs, token).clamp_min(LEAST)
        return known.scatter(-1, token, gates)
