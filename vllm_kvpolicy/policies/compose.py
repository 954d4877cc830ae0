"""A policy made of a scorer and an allocator.

Called by policies.factory, which builds it, and by attention.compaction, which uses it.
Process: worker
"""

import torch

from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage_ref
from vllm_kvpolicy.policies.base import Allocator, Decision, EventInputs, Scorer


class ComposedPolicy:
    """Measures the window's attention once, then scores, then allocates.

    Args:
        scorer: says how important each token is.
        allocator: says how the budget is spent.
    """

    def __init__(self, scorer: Scorer, allocator: Allocator) -> None:
        self.scorer = scorer
        self.allocator = allocator
        self.window_tokens = max(scorer.window_tokens, allocator.window_tokens)
        self.needs_keys = scorer.needs_keys or allocator.needs_keys
        self.has_credit = allocator.has_credit

    def decide(self, inputs: EventInputs, budget: int) -> Decision:
        """Choose `budget` tokens per row.

        Args:
            inputs: the events; every request holds at least `budget` tokens.
            budget: K, tokens per KV head, must-keep tokens included.

        Raises:
            ValueError: keys or queries missing that the policy declared, or a budget
                that no request can hold.
        """
        num_tokens = inputs.must_keep.shape[-1]
        if not 1 <= budget <= num_tokens:
            raise ValueError(f"budget: expected 1..{num_tokens} tokens, got {budget}")
        usage = self._usage(inputs)
        score = self.scorer.score(inputs, usage)
        return self.allocator.choose(score, inputs, usage, budget)

    def arrange(self, sources: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        """Keep survivors in time order: `sources` [E, L, H, C] int64 as they are."""
        return sources

    def _usage(self, inputs: EventInputs) -> WindowUsage | None:
        """Attention of the newest `window_tokens` queries, None if none are asked."""
        if self.window_tokens == 0:
            return None
        if inputs.queries is None or inputs.keys is None:
            raise ValueError(
                f"queries and keys: expected a window of {self.window_tokens} queries "
                "and the cached keys, got None"
            )
        queries = inputs.queries[:, :, :, -self.window_tokens :]
        return window_usage_ref(queries, inputs.keys, inputs.lengths, inputs.scale)
