"""Merges a dropped token into a token of the cache, by weight.

Source: Hard-KV, appendix G, theorem G.1, for pairs, with the logarithms of the
weights as logits; https://github.com/SuDIS-ZJU/HARDInfer.
Deviations: none.
"""

import torch


def merge_pages(
    pages: torch.Tensor, slots: torch.Tensor, others: torch.Tensor, weight: torch.Tensor
) -> None:
    """Replace each token x by weight * x + (1 - weight) * other, computed in float32.

    Args:
        pages: [P, N, D] model dtype, any strides, mutated: keys or values.
        slots: [M] int64, page * N + offset; a slot listed twice has weight 1.
        others: [M, D] model dtype; anything where the weight is 1.
        weight: [M] float32, 0 to 1; at 1 the token stays as it is, bitwise.
    """
    page, offset = slots // pages.shape[1], slots % pages.shape[1]
    own, share = pages[page, offset], weight[:, None]
    mixed = (own.float() * share + others.float() * (1 - share)).to(own.dtype)
    pages[page, offset] = torch.where(share < 1, mixed, own)
