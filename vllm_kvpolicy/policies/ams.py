"""AMS on plain tensors: what one event keeps, without an engine.

`select` is the selection of the AMS paper, and with `parity` the authors' own code; see
`policies.allocators.ams` for both and for what differs. For example, one row of 64
tokens in which tokens 40 to 49 have all the attention:

    usage = torch.zeros(1, 64)
    usage[0, 40:50] = 1.0
    kept = select(usage, usage, 16, AMSConfig(sinks=2, recent=4, min_quota=0)).keep

keeps the sinks 0 and 1, tokens 40 to 49, and the newest ones, 60 to 63.

Axes: R rows, one per (request, layer, KV head); T tokens (right-padded); K budget.
"""

from dataclasses import dataclass

import torch

from vllm_kvpolicy.kernels.ranking import ascending_indices
from vllm_kvpolicy.policies.allocators.ams import PRESETS, AMSConfig, choose

__all__ = ["PRESETS", "AMSConfig", "AMSSelection", "select"]


@dataclass(frozen=True)
class AMSSelection:
    """Result of `select`.

    Args:
        keep: [R, K] int64, token indices, ascending; -1 on the right of rows that hold
            fewer than K tokens.
        segments: [R, S, 2] int64, half-open (start, end), unused ones (length, length).
        quotas: [R, S] int64; add up to K in parity mode, else to K minus must-keep.
        credit: [R, K], credit of the kept tokens, float64 in parity mode, else float32.
    """

    keep: torch.Tensor
    segments: torch.Tensor
    quotas: torch.Tensor
    credit: torch.Tensor


def select(
    usage: torch.Tensor,
    score: torch.Tensor,
    budget: int,
    config: AMSConfig,
    credit: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> AMSSelection:
    """Choose `budget` tokens per row, with sinks and recent tokens from `config`.

    Args:
        usage: [R, T] floating point, pooled and padded window usage; negative values
            and NaN count as zero.
        score: [R, T] floating point, higher is kept sooner within a segment.
        budget: K, tokens per row, at most T and at most every row's length.
        config: parameters.
        credit: [R, <= T], what the last call returned; newer tokens start at zero.
            None at a first event.
        lengths: [R] int64, tokens per row where rows are right-padded, else T.

    Returns:
        Kept indices, segments, quotas and the credit of the kept tokens.

    Raises:
        ValueError: shapes that do not fit, or a budget outside 1..T.
    """
    num_rows, num_tokens = _check_rows(usage, score, budget, credit)
    if lengths is None:
        lengths = torch.full((num_rows,), num_tokens, device=usage.device)
    if credit is not None:
        credit = torch.nn.functional.pad(credit, (0, num_tokens - credit.shape[-1]))
    must_keep = _sinks_and_recent(lengths, num_tokens, budget, config)
    choice = choose(usage, score, must_keep, lengths, budget, config, credit)
    keep = ascending_indices(choice.keep, budget)
    kept_credit = choice.credit.gather(-1, keep.clamp(min=0)).masked_fill(keep < 0, 0.0)
    return AMSSelection(keep, choice.segments, choice.quotas, kept_credit)


def _sinks_and_recent(
    lengths: torch.Tensor, num_tokens: int, budget: int, config: AMSConfig
) -> torch.Tensor:
    """Mark each row's first and newest tokens, [R, T] bool, at most `budget`."""
    if config.parity:
        recent = min(config.recent, budget)
        sinks = min(config.sinks, budget - recent)
    else:
        sinks = min(config.sinks, budget)
        recent = min(config.recent, budget - sinks)
    position = torch.arange(num_tokens, device=lengths.device)
    is_recent = position >= lengths[:, None] - recent
    return ((position < sinks) | is_recent) & (position < lengths[:, None])


def _check_rows(
    usage: torch.Tensor,
    score: torch.Tensor,
    budget: int,
    credit: torch.Tensor | None,
) -> tuple[int, int]:
    """Return (R, T) or raise ValueError."""
    if usage.ndim != 2 or usage.shape != score.shape or usage.shape[-1] == 0:
        raise ValueError(
            "usage and score: expected the same shape [R, T >= 1], got "
            f"{list(usage.shape)} and {list(score.shape)}"
        )
    num_rows, num_tokens = usage.shape
    if not 1 <= budget <= num_tokens:
        raise ValueError(f"budget: expected 1..{num_tokens} tokens, got {budget}")
    if credit is not None and (
        credit.shape[:-1] != usage.shape[:-1] or credit.shape[-1] > num_tokens
    ):
        raise ValueError(
            f"credit: expected [{num_rows}, at most {num_tokens}], got "
            f"{list(credit.shape)}"
        )
    return num_rows, num_tokens
