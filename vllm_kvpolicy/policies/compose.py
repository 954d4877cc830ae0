"""A policy made of a scorer and an allocator."""

from dataclasses import replace
from functools import reduce

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage
from vllm_kvpolicy.policies.base import (
    Allocator,
    Decision,
    EventInputs,
    Needs,
    Policy,
)
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.policies.scorers.base import BaseScorer


class ComposedPolicy(Policy):
    """Measures the window's attention once, then scores, then allocates.

    Args:
        scorer: says how important each token is.
        allocator: says how the budget is spent.
    """

    def __init__(self, scorer: BaseScorer, allocator: Allocator) -> None:
        self.scorer = scorer
        self.allocator = allocator
        self.needs = scorer.needs | allocator.needs
        # As many queries as those who read the usage ask for, however many others do.
        readers = [part.needs for part in (scorer, allocator) if part.needs.usage]
        self.usage_needs = reduce(Needs.__or__, readers, Needs())
        self.dynamic = getattr(allocator, "dynamic", False)

    def check_model(
        self, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Check at start-up that the policy can serve the model; see `Policy`."""
        self.scorer.check_model(num_layers, num_heads, num_kv_heads, head_dim)

    def take_heads(self, shard: HeadShard) -> None:
        """Serve some of the model's heads; see `Policy`."""
        self.scorer.take_heads(shard)

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose `budget` tokens per row.

        Args:
            inputs: the events; every request holds at least `budget` tokens per head
                on average, unless the policy is dynamic.
            budget: K, tokens per KV head, must-keep tokens included.

        Raises:
            ValueError: keys or queries missing that the policy declared, or a budget
                that no request can hold.
        """
        num_tokens = inputs.must_keep.shape[-1]
        may_hold_less = self.dynamic or inputs.candidates is not None
        if not 1 <= budget <= num_tokens and not (may_hold_less and budget > 0):
            raise ValueError(f"budget: expected 1..{num_tokens} tokens, got {budget}")
        usage = measure_usage(self.usage_needs, inputs)
        score = self.scorer.score(inputs, usage)
        remembered = self.scorer.remember(score)
        if inputs.candidates is not None:
            lowest = torch.finfo(score.dtype).min
            score = score.nan_to_num(nan=lowest, neginf=lowest)
            score = score.masked_fill(~inputs.candidates, -torch.inf)
        decision = self.allocator.choose(score, inputs, usage, budget)
        if inputs.candidates is not None:
            decision = replace(decision, keep=decision.keep & inputs.candidates)
        return replace(decision, memory={**decision.memory, **remembered})


def measure_usage(needs: Needs, inputs: EventInputs) -> WindowUsage | None:
    """Measure the attention of the newest `needs.window_tokens` queries.

    Returns:
        None if `needs` asks for no usage.

    Raises:
        ValueError: keys or queries missing.
    """
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
