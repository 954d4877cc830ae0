"""Pairs survivors with the dropped tokens that are merged into them.

a_i = attention to token i, mean over the window and over the group's query heads. Of m
dropped tokens and n survivors, the r-th strongest survivor by a takes the r-th weakest,
by the policy's order, of the min(m, n) best dropped tokens:
k' = w k_s + (1 - w) k_d, v' = w v_s + (1 - w) v_d, w = a_s / (a_s + a_d).

Source: Hard-KV, appendix G, pairwise merging at a fixed budget;
https://github.com/SuDIS-ZJU/HARDInfer, where nothing reaches it.
Deviations: a is the mean of the query heads' probabilities, not the softmax of their
largest logit. With more dropped tokens than survivors the worst go unmerged.
"""

import torch

from vllm_kvpolicy.kernels.ranking import rank_by
from vllm_kvpolicy.kernels.window_usage import mean_over_group
from vllm_kvpolicy.policies.base import EventInputs, Merge


def choose_merge(
    keep: torch.Tensor, order: torch.Tensor, inputs: EventInputs, usage: torch.Tensor
) -> Merge:
    """Pair the tokens of each head, sinks and local tokens left out.

    Args:
        keep: [E, L, H, T] bool, the policy's choice.
        order: [E, L, H, T] floating point, higher is kept sooner.
        inputs: the event.
        usage: [E, L, Hq, T] float32, mean attention of the window.
    """
    attention = mean_over_group(usage, keep.shape[2])
    free = inputs.valid & ~inputs.must_keep
    partner = pair_up(keep & free, ~keep & free, attention, order)
    other = attention.gather(-1, partner.clamp_min(0))
    total = attention + other
    weight = torch.where((partner < 0) | (total == 0), 1.0, attention / total)
    return Merge(partner, weight)


def pair_up(
    strong: torch.Tensor,
    weak: torch.Tensor,
    attention: torch.Tensor,
    order: torch.Tensor,
) -> torch.Tensor:
    """Pair the r-th strong token with the r-th last of as many weak ones.

    For example strong tokens A, B, C by attention and weak ones x, y, z, u by order: u
    goes without, A takes z, B takes y and C takes x.

    Args:
        strong: [..., T] bool, ranked by attention.
        weak: [..., T] bool, ranked by order; the worst of them go without.
        attention: [..., T] floating point.
        order: [..., T] floating point; NaN allowed.

    Returns:
        [..., T] int64, a token's partner, no token twice; -1 for none.
    """
    token = torch.arange(strong.shape[-1], device=strong.device)
    count = torch.minimum(strong.sum(-1), weak.sum(-1))[..., None]
    rank = rank_by(weak.long(), order)
    best_first = torch.empty_like(rank).scatter_(-1, rank, token.expand_as(rank))
    place = count - 1 - rank_by(strong.long(), attention)
    partner = best_first.gather(-1, place.clamp_min(0))
    return torch.where(strong & (place >= 0), partner, -1)
