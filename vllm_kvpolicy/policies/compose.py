"""How a policy is put together from the words of its name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.visibility import NEVER
from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage
from vllm_kvpolicy.policies.base import Decision, EventInputs, Needs, Policy
from vllm_kvpolicy.policies.names import ResolvedPolicy, parse, resolve
from vllm_kvpolicy.policies.words import BaseAdmission, BaseAllocator, BaseScorer, Word

# Names under which the gates of an admission and true positions are remembered.
MEMORY, POSITIONS = "admission", "positions"
LEAST = 2.0**-126  # stands for a gate of 0 in memory, where 0 means not evaluated


class KeepAll(Policy, Word):
    """Keeps every token, in time order: what a selection alone chooses from."""

    summary = "keeps everything"
    source = "this project"
    reads_heads = False

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep all valid tokens, whatever the budget; newer ones score higher."""
        keep = inputs.valid
        position = torch.arange(keep.shape[-1], device=keep.device)
        return Decision(keep, position.float().expand(keep.shape))


class ComposedPolicy(Policy):
    """Measures the window's attention once, then scores, then allocates."""

    def __init__(self, scorer: BaseScorer, allocator: BaseAllocator) -> None:
        self.scorer = scorer
        self.allocator = allocator
        self.consists_of = scorer, allocator
        self.needs = scorer.needs | allocator.needs
        # As many queries as those who read the usage ask for, however many others do.
        readers = [part.needs for part in (scorer, allocator) if part.needs.usage]
        self.usage_needs = reduce(Needs.__or__, readers, Needs())
        self.dynamic = allocator.dynamic

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose `budget` tokens per row, must-keep tokens included.

        Every request holds that many per head on average, unless this is dynamic.

        Raises:
            ValueError: inputs, scores or memory that are not as the policy declares, or
                a budget that no request can hold.
        """
        num_tokens = inputs.must_keep.shape[-1]
        may_hold_less = self.dynamic or inputs.candidates is not None
        if not 1 <= budget <= num_tokens and not (may_hold_less and budget > 0):
            raise ValueError(f"budget: expected 1..{num_tokens} tokens, got {budget}")
        usage = measure_usage(self.usage_needs, inputs)
        score = self.scorer.score(inputs, usage)
        check_score(score, inputs)
        remembered = self.scorer.remember(score)
        if inputs.candidates is not None:
            lowest = torch.finfo(score.dtype).min
            score = score.nan_to_num(nan=lowest, neginf=lowest)
            score = score.masked_fill(~inputs.candidates, -torch.inf)
        decision = self.allocator.choose(score, inputs, usage, budget)
        if inputs.candidates is not None:
            keep, score = decision.keep & inputs.candidates, decision.score
            decision = replace(decision, keep=keep, score=others_last(score, inputs))
        memory = {**decision.memory, **remembered}
        check_memory(memory, self.needs)
        return replace(decision, memory=memory)


def others_last(score: Tensor, inputs: EventInputs) -> Tensor:
    """Return scores by which what is no candidate fills up pages last."""
    if inputs.candidates is None:
        return score
    return score.masked_fill(~inputs.candidates, -torch.inf)


def check_score(score: Tensor, inputs: EventInputs) -> None:
    """Raise ValueError unless a scorer has returned a number for every token."""
    shape = inputs.must_keep.shape
    if score.shape != shape or not score.is_floating_point():
        raise ValueError(
            f"score: got {list(score.shape)} of {score.dtype}, expected [E, L, H, T], "
            f"{list(shape)}, of floating point"
        )


def check_memory(memory: Mapping[str, Tensor], needs: Needs) -> None:
    """Raise ValueError unless survivors remember what was declared, by name."""
    if memory.keys() != set(needs.memory):
        raise ValueError(
            f"memory: got {', '.join(memory) or 'nothing'}, expected "
            f"{', '.join(needs.memory) or 'nothing'}, as `needs.memory` declares"
        )


def measure_usage(needs: Needs, inputs: EventInputs) -> WindowUsage | None:
    """Measure the newest queries' attention; None where no usage is asked for."""
    if not needs.usage:
        return None
    return window_usage(
        inputs.given("queries")[:, :, :, -needs.window_tokens :],
        inputs.paged("keys"),
        inputs.lengths,
        inputs.scale,
        needs.mass or None,
        inputs.sink_logits,
    )


class AdmittedPolicy(Policy):
    """Keeps the admitted tokens, or those that an eviction chooses among them.

    A token's gate is evaluated once, while it is computed or at the first event after
    that, and remembered for as long as the token is held. Admission alone has no
    budget; an eviction after it chooses among the admitted tokens.

    Source: WG-KV (arXiv 2512.17452) sections 3.2 and 3.3; the eviction of its appendix
    K.1 is `trim-snapmax`. Deviations: tokens leave the window at events, not one by
    one; heads are filled up to whole pages with refused tokens, best first, which the
    next event may drop.
    """

    dynamic = True

    def __init__(self, admission: BaseAdmission, eviction: Policy | None) -> None:
        self.admission, self.eviction = admission, eviction
        self.consists_of = tuple(filter(None, (admission, eviction)))
        self.needs = admission.needs
        if not self.needs.until:
            self.needs |= Needs(memory=(MEMORY,))
        if eviction is not None:
            self.needs |= eviction.needs

    @property
    def decider(self) -> BaseAdmission | None:
        """What decides while tokens are computed; None where gates wait for events."""
        return self.admission if self.needs.until else None

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Keep admitted and must-keep tokens; at most `budget` where there is one."""
        gates = self._gates(inputs)
        is_useful = gates > self.admission.threshold
        admitted = inputs.valid & (inputs.must_keep | is_useful)
        if inputs.candidates is not None:
            admitted &= inputs.candidates
        memory = {} if self.needs.until else {MEMORY: gates}
        notes = {"gates": gates}
        if self.eviction is None:
            return Decision(admitted, others_last(gates, inputs), memory, notes)
        chosen = self.eviction.decide(replace(inputs, candidates=admitted), budget)
        # Refused tokens fill up pages after all others, best gates first.
        lowest = torch.finfo(gates.dtype).min
        score = torch.where(admitted, chosen.score / 2, lowest * (1 - gates / 4))
        return replace(
            chosen,
            score=others_last(score, inputs),
            memory={**chosen.memory, **memory},
            notes={**chosen.notes, **notes},
        )

    def _gates(self, inputs: EventInputs) -> Tensor:
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


def build(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy by name and `--kv-policy-config`, without a server.

    Raises:
        ValueError: an unknown name, an unknown option, or a value outside its range.
    """
    return assemble(resolve(parse(name), options or {}))


def assemble(policy: ResolvedPolicy) -> Policy:
    """Put a policy together from its words and options.

    Raises:
        ValueError: a file that a word needs is missing, broken, or something else; or a
            word reads or does what its class attributes do not declare.
    """
    info = policy.info
    if info.whole is not None:
        return policy.build(info.whole)
    built: Any = None
    if info.scorer is not None and info.allocator is not None:
        scorer, allocator = policy.build(info.scorer), policy.build(info.allocator)
        built = ComposedPolicy(scorer, allocator)
        if built.usage_needs.usage and not built.usage_needs.window_tokens:
            raise ValueError(
                f"kv_policy: {info.name} has {built.needs}, expected a `query_window` "
                "of those who read the usage"
            )
        remembered = [*scorer.needs.memory, *allocator.needs.memory]
        if len({*remembered, MEMORY, POSITIONS}) < len(remembered) + 2:
            raise ValueError(
                f"kv_policy: scorer and allocator of {info.name} remember "
                f"{', '.join(remembered)}, expected names of their own, not {MEMORY} "
                f"or {POSITIONS}"
            )
        if built.needs.until or built.needs.exact:
            raise ValueError(
                f"kv_policy: {info.name} has {built.needs}, expected `until` and "
                "`exact` of admissions only"
            )
    shift = 0
    if info.admission is not None:
        admission = policy.build(info.admission)
        shift, built = admission.shift, AdmittedPolicy(admission, built)
    needs = built.needs
    declared = {
        "decides": needs.until == policy.decides,
        "decides_later": not shift or info.admission.decides_later,
        "query_window": needs.window_tokens <= policy.window_tokens,
        "rotates": not needs.rope or any(word.rotates for word in info.parts),
        "measures_tokens": not needs.signals or info.measures_tokens,
    }
    for attribute, is_declared in declared.items():
        if not is_declared:
            raise ValueError(
                f"kv_policy: {info.name} has {needs}, and no class of its words says "
                f"the same by {attribute}; see policies.words.Word"
            )
    return built
