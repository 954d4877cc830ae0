"""H2O: score_i = score_i of the last event + sum over group and window of
softmax_i(q_w . k_i * scale).

Source: H2O (arXiv 2306.14048) section 4.1, algorithm 1;
https://github.com/FMInference/H2O/blob/main/h2o_hf/utils_hh/modify_llama.py.
Deviations: the running sum takes in the W queries captured before each event, not every
query: an engine that never forms the attention matrix has no others. It runs per KV
head, over the query heads that read it; the original's recent half of the budget is the
must-keep set that all policies share.
"""

from collections.abc import Mapping

from torch import Tensor

from vllm_kvpolicy.kernels.window_usage import WindowUsage, measured
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import WindowOptions
from vllm_kvpolicy.policies.words import BaseScorer

RECEIVED = "h2o"  # name of the running sum in a policy's memory


class H2OScorer(BaseScorer):
    """Scores a token by the attention it has received so far."""

    summary = "attention received so far, summed over the query windows"
    source = "H2O, arXiv 2306.14048"
    reads_heads = False
    query_window = "window"
    needs = Needs(usage=True, keys=True, memory=(RECEIVED,))
    Options = WindowOptions

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32; what a token got from queries, never less."""
        usage = measured(usage)
        num_heads = inputs.lengths.shape[2]
        mean = usage.mean.unflatten(2, (num_heads, -1)).sum(3)
        return inputs.memory[RECEIVED] + mean * usage.window[..., None]

    def remember(self, score: Tensor) -> Mapping[str, Tensor]:
        return {RECEIVED: score}
