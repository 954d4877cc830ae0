"""SnapKV with maxima: score_i = maxpool mean_w max_g softmax_i(q_gw . k_i * scale),

w over the window, g over the query heads of a KV head, i over the tokens that may be
dropped: admitted, older than the window, no sinks. Neighbours in the pooling are the
next of these tokens, whatever was dropped between them.

Source: WG-KV (arXiv 2512.17452) appendix K.1, which evicts with the allocator `trim`
after an admission; https://github.com/EMCLab-Sinica/WG-KV/blob/a6943894/src/modeling_layers.py,
which has the mean over the window where the paper has the sum, in the same order.
Deviations: tokens that are not scored get the row's highest score (theirs are never
dropped).
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.softmax import effective_window, masked_softmax
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import BaseOptions, Queries, Width
from vllm_kvpolicy.policies.scorers._windows import (
    fill_with_highest,
    map_windows,
    older_tokens,
)
from vllm_kvpolicy.policies.words import BaseScorer


class SnapMaxScorer(BaseScorer):
    """Scores a token by its share of the window's attention to droppable tokens."""

    summary = "largest attention of the newest queries to tokens that may be dropped"
    source = "WG-KV, arXiv 2512.17452, appendix K.1"
    reads_heads = False
    query_window = "snapmax_window"
    weighs_itself = True
    needs = Needs(keys=True)

    class Options(BaseOptions):
        snapmax_window: Queries = Field(
            256, description="number of newest queries that score the older tokens"
        )
        snapmax_kernel: Width = Field(
            5, description="width of the max pooling over tokens"
        )

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32; tokens that are not scored get the highest."""
        size = self.needs.window_tokens
        held = inputs.valid if inputs.candidates is None else inputs.candidates
        measured = held & ~inputs.must_keep & older_tokens(inputs, size)
        attention = map_windows(_attention, inputs, size, measured)
        attention = attention / effective_window(inputs.lengths, size)[..., None]
        return fill_with_highest(self._pooled(attention, measured), measured)

    def _pooled(self, attention: Tensor, measured: Tensor) -> Tensor:
        """Take maxima over neighbouring measured tokens, both [E, L, H, T]."""
        place = measured.long().cumsum(-1) - 1
        packed = F.pad(torch.zeros_like(attention), (0, 1))
        last = packed.shape[-1] - 1  # takes what is not measured
        packed = packed.scatter(-1, torch.where(measured, place, last), attention)
        rows = packed[..., :last].flatten(0, 1)
        kernel = self.options.snapmax_kernel
        pooled = F.max_pool1d(rows, kernel, 1, kernel // 2)
        return pooled.view_as(attention).gather(-1, place.clamp(min=0))


def _attention(logits: Tensor, measured: Tensor) -> Tensor:
    """Sum the window's largest attention to measured tokens, [n, H, T] float32."""
    return masked_softmax(logits, measured[:, :, None, None]).amax(2).sum(2)
