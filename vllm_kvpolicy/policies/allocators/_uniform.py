"""The uniform allocator: every KV head keeps its best tokens, all heads equally many.

Source: https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/scorer_press.py.
Deviations: exactly `budget` tokens, must-keep tokens included; survivors stay in time
order (theirs are left in score order, which later events take for time order).
"""

from torch import Tensor

from vllm_kvpolicy.kernels.ranking import limit_must_keep, top_k_mask
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import Decision, EventInputs
from vllm_kvpolicy.policies.words import BaseAllocator


class UniformTopK(BaseAllocator):
    """Keeps the must-keep tokens and the highest scores of each head."""

    summary = "the best tokens of each head"
    source = "kvpress 0.4.0, ScorerPress"
    reads_heads = False

    def choose(
        self, score: Tensor, inputs: EventInputs, usage: WindowUsage | None, budget: int
    ) -> Decision:
        must_keep = limit_must_keep(inputs.must_keep, budget)
        # After an admission a row may hold fewer tokens than the budget.
        size = inputs.lengths.clamp(max=budget)
        return Decision(top_k_mask(score, must_keep, inputs.valid, size), score)
