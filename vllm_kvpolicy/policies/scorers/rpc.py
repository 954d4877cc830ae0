"""RPC: score_i = mean over query heads of sum over w of softmax_i(q_w . k_i * scale),
pooled, i over the tokens between the prompt and the newest W.

Source: Reasoning Path Compression (arXiv 2505.13866) section 4;
https://github.com/jiwonsong-dev/ReasoningPathCompression/blob/eb0b5fde2ed5777f407e9184cdf98938c76124d6/rpc/rpc_utils.py.
Deviations: a fixed budget (theirs grows by 256 tokens from event to event). The prompt
is the leading run of must-keep tokens; it and the newest W tokens, which the original
always keeps, get the row's highest score. As in `tova`, the mean over all
query heads of the layer goes by cache index.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.ranking import leading_run
from vllm_kvpolicy.kernels.softmax import masked_softmax
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import BaseOptions, Queries, Width
from vllm_kvpolicy.policies.scorers._windows import (
    fill_with_highest,
    map_windows,
    older_tokens,
)
from vllm_kvpolicy.policies.scorers.tova import cross_head_mean
from vllm_kvpolicy.policies.words import BaseScorer


class RPCScorer(BaseScorer):
    """Scores a token by its share of the newest queries' attention to older tokens."""

    summary = (
        "pooled attention of the newest queries to older tokens, averaged over all "
        "heads"
    )
    source = "Reasoning Path Compression, arXiv 2505.13866"
    reads_heads = False
    query_window = "rpc_window"
    weighs_itself = True
    pins_prompt = True
    needs = Needs(keys=True)

    class Options(BaseOptions):
        rpc_window: Queries = Field(
            32, description="number of newest queries that score the older tokens"
        )
        rpc_kernel: Width = Field(
            7, description="width of the average pooling over tokens"
        )

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32; prompt and newest tokens get the highest."""
        size = self.needs.window_tokens
        measured = older_tokens(inputs, size) & ~leading_run(inputs.must_keep)
        received = map_windows(_received, inputs, size, measured)
        mean = cross_head_mean(received, inputs.ranks)
        mean = torch.where(measured, mean, 0.0).flatten(0, 1)
        kernel = self.options.rpc_kernel
        pooled = F.avg_pool1d(mean, kernel, stride=1, padding=kernel // 2)
        return fill_with_highest(pooled.view(measured.shape), measured)


def _received(logits: Tensor, measured: Tensor) -> Tensor:
    """Sum each token's share of attention over the window, [n, Hq, T] float32."""
    return masked_softmax(logits, measured[:, :, None, None]).sum(3).flatten(1, 2)
