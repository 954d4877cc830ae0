"""Softmax over those tokens of a row that count."""

import math

import torch
import torch.nn.functional as F

TINY = 2.0**-120  # a weight, next to the largest of its row, that counts as none


def weights_of(logits: torch.Tensor, least: float) -> torch.Tensor:
    """Return exp(logit - highest of its row), [..., T] float32.

    Args:
        logits: [..., T] float32.
        least: what smaller weights are raised to, hidden ones too; above 2^-126,
            since a CPU takes several times as long below.
    """
    # A row that shows nothing has no finite maximum.
    highest = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    return (logits - highest).clamp_(min=math.log(least)).exp_()


def clean_(logits: torch.Tensor) -> torch.Tensor:
    """Make NaN minus infinity and infinity the largest number, in place.

    So NaN does not spread to its row; an infinite logit takes the whole row.

    Args:
        logits: floating point.
    """
    highest = torch.finfo(logits.dtype).max
    return logits.nan_to_num_(nan=-torch.inf, posinf=highest, neginf=-torch.inf)


def softmax(
    logits: torch.Tensor, sink_logits: torch.Tensor | None = None
) -> torch.Tensor:
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


def masked_softmax(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Share one unit among the tokens of each row that `mask` admits.

    Args:
        logits: [..., T] float32; may hold anything outside the mask.
        mask: bool, broadcastable to [..., T].

    Returns:
        [..., T] float32, see `softmax`.
    """
    return softmax(clean_(logits.masked_fill(~mask, -torch.inf)))
