"""R-KV: score_i = lambda a_i - (1 - lambda) s_i, attention against redundancy,

a = maxpool mean_w softmax_i max_g (q_gw . k_i * scale), i over the keys older than the
window; s = softmax_i mean_j c_ji, c the cosines of the keys less the diagonal and, in
each row j, less its last entry above a threshold (its first entry if none is above).

Source: R-KV (arXiv 2505.24133) section 3;
https://github.com/Zefan-Cai/R-KV/blob/d15c9767e67c2bd9807128fecc35223fa2484a69/rkv/compression/r1_kv.py.
Deviations: survivors stay in time order (theirs are left in score order, which changes
what is "last" and who is whose neighbour in the pooling); float32 (theirs rounds both
terms to the model dtype); no matrix of T^2 cosines; the newest W tokens get the row's
highest score (theirs keeps them whatever they score).
"""

from functools import partial

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.last_similar import last_similar
from vllm_kvpolicy.kernels.softmax import effective_window, masked_softmax
from vllm_kvpolicy.kernels.window_usage import WindowUsage
from vllm_kvpolicy.policies.base import EventInputs, Needs
from vllm_kvpolicy.policies.options import BaseOptions, Queries, Share, Width
from vllm_kvpolicy.policies.scorers._windows import (
    fill_with_highest,
    map_windows,
    older_tokens,
)
from vllm_kvpolicy.policies.words import BaseScorer

NORM_EPS = 1e-8  # makes a key of zeros similar to none


class RKVScorer(BaseScorer):
    """Scores a token by the window's attention and by how few keys resemble its key."""

    summary = "attention of the newest queries, minus similarity to other keys"
    source = "R-KV, arXiv 2505.24133"
    query_window = "rkv_window"
    weighs_itself = True
    needs = Needs(keys=True)

    class Options(BaseOptions):
        rkv_window: Queries = Field(
            8, description="number of newest queries that score the older tokens"
        )
        rkv_kernel: Width = Field(7, description="width of the max pooling over tokens")
        rkv_lambda: Share = Field(
            0.07, description="weight of attention; redundancy gets the rest"
        )
        rkv_threshold: Share = Field(
            0.5, description="cosine similarity above which two keys are similar"
        )

    def score(self, inputs: EventInputs, usage: WindowUsage | None) -> Tensor:
        """Score [E, L, H, T] float32; the newest tokens get the highest."""
        size, keys = self.needs.window_tokens, inputs.given("keys")
        is_older = older_tokens(inputs, size)
        attention = map_windows(_attention, inputs, size, is_older)
        attention = attention / effective_window(inputs.lengths, size)[..., None]
        similar = map_pairs(
            partial(redundancy, self.options.rkv_threshold),
            3 * 4 * keys[0, 0].numel(),
            keys,
            inputs.valid,
        )
        kernel, weight = self.options.rkv_kernel, self.options.rkv_lambda
        pooled = F.max_pool1d(attention.flatten(0, 1), kernel, 1, kernel // 2)
        score = weight * pooled.view_as(similar) - (1 - weight) * similar
        return fill_with_highest(score, is_older)


def _attention(logits: Tensor, is_older: Tensor) -> Tensor:
    """Sum the attention of the window to the older keys, [n, H, T] float32."""
    return masked_softmax(logits.amax(2), is_older[:, :, None]).sum(2)


def redundancy(threshold: float, keys: Tensor, valid: Tensor) -> Tensor:
    """Measure how much each key resembles the other keys of its row.

    With keys k of length 1, the sum of column i is k_i . sum_j k_j - k_i . k_i, less
    the cosines of the rows whose last similar key is i.

    Args:
        keys: [n, H, T, D] model dtype.
        valid: [n, H, T] bool, False on padding.

    Returns:
        [n, H, T] float32, sums to 1 over the tokens of a row; zero on padding.
    """
    held = torch.where(valid[..., None], keys.float(), 0.0).flatten(0, 1)
    unit = held / (torch.linalg.vector_norm(held, dim=-1, keepdim=True) + NORM_EPS)
    total = unit.sum(1, keepdim=True, dtype=torch.float64).float()
    column = (unit * (total - unit)).sum(-1).double()
    last, cosine = last_similar(unit, threshold)
    column = column.scatter_add(-1, last, -cosine.double()).view(valid.shape)
    mean = column / valid.sum(-1, keepdim=True)
    return masked_softmax(mean.float(), valid)
