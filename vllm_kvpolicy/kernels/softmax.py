"""Logits of the newest W queries over the keys that they see, and softmax over logits.

Source: causal attention of the captured queries, each at its own position (AMS,
arXiv 2605.23200, section 3.1, rotates the whole window to the current one).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 2.0**-120  # a weight, next to the largest of its row, that counts as none


def weights_of(logits: Tensor, least: float) -> Tensor:
    """Return exp(logit - highest of its row), [..., T] float32.

    Args:
        logits: [..., T] float32.
        least: what smaller weights are raised to, hidden ones too; above 2^-126,
            since a CPU takes several times as long below.
    """
    # A row that shows nothing has no finite maximum.
    highest = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return (logits - highest).clamp_(min=math.log(least)).exp_()


def clean_(logits: Tensor) -> Tensor:
    """Make NaN minus infinity and infinity the largest number, in place.

    So NaN does not spread to its row; an infinite logit takes the whole row.

    Args:
        logits: floating point.
    """
    highest = torch.finfo(logits.dtype).max
    return logits.nan_to_num_(nan=-torch.inf, posinf=highest, neginf=-torch.inf)


def softmax(logits: Tensor, sink_logits: Tensor | None = None) -> Tensor:
    """Share one unit among the tokens of each row, and its sink.

    Args:
        logits: [..., T] float32, see `clean_`; minus infinity is left out.
        sink_logits: float32, broadcastable to [...], of what takes a share beside the
            tokens and gives nothing; None for none.

    Returns:
        [..., T] float32, zero for what is left out, also if that is all. The sum is
        carried in float64, so that padding does not change it.
    """
    if sink_logits is not None:
        column = sink_logits.expand(logits.shape[:-1])[..., None]
        return softmax(torch.cat([logits, column], -1))[..., :-1]
    weight = F.threshold(weights_of(logits, TINY), 2 * TINY, 0.0, inplace=True)
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    return weight.div_(total.clamp_(min=1).float())


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Share one unit among the tokens of each row that `mask` admits.

    Args:
        logits: [..., T] float32; may hold anything outside the mask.
        mask: bool, broadcastable to [..., T].

    Returns:
        [..., T] float32, see `softmax`.
    """
    return softmax(clean_(logits.masked_fill(~mask, -torch.inf)))


def effective_window(lengths: Tensor, window_tokens: int) -> Tensor:
    """Shorten the window of requests that hold no more than `window_tokens` tokens.

    At least one key stays older than the window, and at least one query stays in it.

    Args:
        lengths: [E, L, H] int64, tokens held.
        window_tokens: W, queries captured.

    Returns:
        [E, L, H] int64, between 1 and W.
    """
    return (lengths - 1).clamp(1, max(window_tokens, 1))


def window_logits(
    queries: Tensor, keys: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Dot products of n (event, layer) pairs; query w has index lengths - W + w.

    Args:
        queries: [n, Hq, W, D] model dtype, post-RoPE, newest last.
        keys: [n, H, T, D] model dtype, post-RoPE; padding may hold anything.
        lengths: [n, H] int64, tokens held, 1..T.
        scale: softmax scale.

    Returns:
        [n, H, G, W, T] float32; minus infinity where a query does not see a key, in the
        rows of queries outside the window of a short request, and in place of NaN; the
        largest number in place of infinity.
    """
    num_heads, num_tokens = keys.shape[1:3]
    window = queries.shape[2]
    rows = queries.float().unflatten(1, (num_heads, -1)).flatten(2, 3)
    logits = torch.matmul(rows, keys.float().transpose(-1, -2)).mul_(scale)
    step = torch.arange(window, device=keys.device)
    length = lengths[..., None]
    in_window = step >= window - effective_window(length, window)
    seen = torch.where(in_window, length - window + step, -1)  # [n, H, W], newest key
    token = torch.arange(num_tokens, device=keys.device)
    # Added, not filled in: several times as fast on a CPU.
    bias = torch.where(token > seen[..., None], -torch.inf, 0.0)[:, :, None]
    return clean_(logits.unflatten(2, (-1, window)).add_(bias))
