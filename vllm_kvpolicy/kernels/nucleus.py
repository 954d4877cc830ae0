"""Counts the keys that hold most of a query's attention; measures what survivors hold.

All of it is raw attention per KV head: the logit of a key is the largest of the group's
query heads, a row is one of the newest W queries, and the softmax goes over every token
that the query sees, must-keep tokens included.

Source: Hard-KV, Problem 1 (top-p), Cautious Update (votes) and appendix G (LSE);
https://github.com/SuDIS-ZJU/HARDInfer.
Deviations: weights in fixed point, 2^-32 of the row's largest and at least that, so
that sums depend neither on their order nor on padding and mass 1 is every token; no row
sees a later key (in the authors' code early rows see the whole window).
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import map_pairs
from vllm_kvpolicy.kernels.ranking import ranked_positions
from vllm_kvpolicy.kernels.softmax import effective_window, weights_of, window_logits

WEIGHT_UNIT = 2**32  # fixed-point weight of a row's largest logit
TEMPERATURES = 1e-3, 1e3  # lowest and highest
HALVINGS = 30  # of the logarithm of this range


def nucleus_mask(logits: Tensor, mass: float) -> Tensor:
    """Mark the fewest largest logits that hold `mass` of their row's softmax.

    Args:
        logits: [..., T] floating point; minus infinity is left out.
        mass: p, above 0, at most 1.

    Returns:
        [..., T] bool; ties go to the later ones.
    """
    order = ranked_positions(logits)
    weight = _weights(logits).gather(-1, order)
    running = weight.cumsum(-1)
    inside = running - weight < running[..., -1:].double() * mass
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def row_nucleus_counts(logits: Tensor, mass: float) -> Tensor:
    """Count the fewest largest logits that hold `mass` of their row's softmax.

    Args:
        logits: [..., T] float32 without NaN; minus infinity is left out.
        mass: p, above 0, at most 1.

    Returns:
        [...] int64 tokens; 0 where every logit is left out.
    """
    return _counts(_rising(logits), mass)


def temperatures(logits: Tensor, counts: Tensor, mass: float) -> Tensor:
    """Find temperatures at which as many logits hold `mass` as are asked for.

    Of softmax(logits / temperature) the fewest largest weights that hold `mass` are
    more, the higher the temperature. Found by bisection.

    Source: Hard-KV, Problem 1 and algorithm 2.
    Deviations: a range of 1e-3..1e3 (theirs ends at 1, or 10); until the count is the
    one asked for, not until the mass is near `mass`.

    Args:
        logits: [..., T] float32 without NaN; minus infinity is left out.
        counts: [...] integers, tokens; at least 1.
        mass: p, above 0, at most 1.

    Returns:
        [...] float32, the lowest that reaches `counts`; 0 where none does.
    """
    rising, (low, high) = _rising(logits), map(math.log, TEMPERATURES)
    is_in_reach = _counts(rising / TEMPERATURES[1], mass) >= counts
    lowest = torch.full(counts.shape, low, dtype=torch.float64, device=counts.device)
    highest = torch.full_like(lowest, high)
    for _ in range(HALVINGS):
        middle = (lowest + highest) / 2
        reached = _counts(rising / middle.exp().float()[..., None], mass) >= counts
        highest = torch.where(reached, middle, highest)
        lowest = torch.where(reached, lowest, middle)
    return torch.where(is_in_reach, highest.exp(), 0.0).float()


def _counts(rising: Tensor, mass: float) -> Tensor:
    """Count as `row_nucleus_counts`, of logits of which the largest come last."""
    # What is left out comes first and adds one unit each: cheaper than to mask it.
    shape = (*rising.shape[:-1], 1)
    lowest = rising.new_full(shape, torch.finfo(rising.dtype).min)
    left_out = torch.searchsorted(rising, lowest)
    running = _units(rising).cumsum(-1)
    # A key is inside while what the larger ones hold falls short of the mass: where
    # what it holds along with the smaller ones is above the rest.
    total = running[..., -1:] - left_out
    rest = running[..., -1:] - (total.double() * mass).ceil().long()
    return rising.shape[-1] - torch.searchsorted(running, rest, right=True)[..., 0]


def nucleus_counts(
    queries: Tensor, keys: Tensor, lengths: Tensor, scale: float, mass: float
) -> Tensor:
    """Count the keys in the nucleus of each row of the window.

    Args:
        queries: [E, L, Hq, W, D] model dtype, post-RoPE, newest last.
        keys: [E, L, H, T, D] model dtype, post-RoPE; padding may hold anything.
        lengths: [E, L, H] int64, tokens held, 1..T.
        scale: softmax scale.
        mass: p, above 0, at most 1.

    Returns:
        [E, L, H, W] int64 tokens; 0 for rows outside a short request's window.
    """
    function = partial(row_nucleus_counts, mass=mass)
    return _map_logits(function, scale, queries, keys, lengths)


def nucleus_votes(
    queries: Tensor, keys: Tensor, lengths: Tensor, scale: float, mass: float
) -> Tensor:
    """Count the rows of the window whose nucleus holds a key.

    Args: as for `nucleus_counts`.

    Returns:
        [E, L, H, T] int64, at most W; 0 on padding.
    """

    def votes(logits: Tensor) -> Tensor:
        return nucleus_mask(logits, mass).sum(-2)

    return _map_logits(votes, scale, queries, keys, lengths)


def retained_mass(
    queries: Tensor, keys: Tensor, lengths: Tensor, scale: float, keep: Tensor
) -> Tensor:
    """Measure the share of each row's attention that survivors hold.

    Its logarithm is what a row's LSE changes by when the other tokens go.

    Args:
        queries, keys, lengths, scale: as for `nucleus_counts`.
        keep: [E, L, H, T] bool, survivors.

    Returns:
        [E, L, H, W] float32, 0 to 1; 1 for rows outside a short request's window.
    """

    def retained(logits: Tensor, keep: Tensor) -> Tensor:
        weight = _weights(logits)
        whole = weight.sum(-1)
        kept = weight.masked_fill(~keep[:, :, None], 0).sum(-1)
        share = kept.double() / whole.clamp(min=1)
        return torch.where(whole > 0, share, 1.0).float()

    return _map_logits(retained, scale, queries, keys, lengths, keep)


def window_mean(rows: Tensor, lengths: Tensor) -> Tensor:
    """Average over the rows of the window that count.

    Of `nucleus_counts` that is a head's mean nucleus, of minus the logarithm of
    `retained_mass` its LSE deficit.

    Args:
        rows: [E, L, H, W], 0 for rows outside a short request's window.
        lengths: [E, L, H] int64, tokens held.

    Returns:
        [E, L, H] float32.
    """
    used = effective_window(lengths, rows.shape[-1])
    return (rows.sum(-1, dtype=torch.float64) / used).float()


def _rising(logits: Tensor) -> Tensor:
    """Sort [..., T] floating point, the largest last.

    On the CPU by NumPy, whose sort of short rows is vectorised and 20 times as fast.
    """
    if logits.device.type != "cpu" or type(logits) is not Tensor:
        return logits.sort(dim=-1).values
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1))


def _weights(logits: Tensor) -> Tensor:
    """Return exp(logit - highest) of [..., T] in fixed point, int64, 0 if left out."""
    return _units(logits).masked_fill_(logits == -torch.inf, 0)


def _units(logits: Tensor) -> Tensor:
    """Return exp(logit - highest) of [..., T] in fixed point, int64, at least 1."""
    weight = weights_of(logits, WEIGHT_UNIT**-1.25).mul_(WEIGHT_UNIT)
    return weight.round_().clamp_(min=1).long()


def _map_logits(
    function: Callable[..., Tensor],
    scale: float,
    queries: Tensor,
    keys: Tensor,
    lengths: Tensor,
    *others: Tensor,
) -> Tensor:
    """Apply `function` to the logits [n, H, W, T] of a few (event, layer) pairs.

    It also takes the pairs' `others`, which are [E, L, ...] here and [n, ...] there.
    """
    num_heads, num_tokens = keys.shape[2:4]
    num_q_heads, window = queries.shape[2:4]

    def of_chunk(*pairs: Tensor) -> Tensor:
        queries, keys, lengths, *others = pairs
        logits = window_logits(queries, keys, lengths, scale)
        return function(logits.amax(2), *others)

    # float32 logits of all query heads; four int64 rows per KV head.
    pair_bytes = window * num_tokens * (4 * num_q_heads + 32 * num_heads)
    return map_pairs(of_chunk, pair_bytes, queries, keys, lengths, *others)
