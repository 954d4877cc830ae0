"""Smooths the window's attention over neighbours, and gives the newest keys a value.

Source: AMS (arXiv 2605.23200) section 3.1 and its code, see kernels.window_usage.
Deviations: the newest entries get a value per (request, KV head) (theirs takes the
maximum over every head of every request, available as "global").
"""

import torch
import torch.nn.functional as F

from vllm_kvpolicy.kernels.dispatch import Operation

SUFFIX_PADS = ("max", "mean", "none", "global")


def check_pooling(pool_kernel: int, suffix_pad: str) -> None:
    """Raise ValueError for what `pooled_usage` does not take."""
    if suffix_pad not in SUFFIX_PADS:
        raise ValueError(
            f"suffix_pad: expected one of {SUFFIX_PADS}, got {suffix_pad!r}"
        )
    if pool_kernel < 1 or pool_kernel % 2 == 0:
        raise ValueError(f"pool_kernel: expected an odd number >= 1, got {pool_kernel}")


def pooled_usage_ref(
    usage: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> torch.Tensor:
    """Smooth the usage of the older keys and give the newest ones a value.

    Args:
        usage: [E, L, H, T] floating point, mean probability of each key.
        lengths: [E, L, H] int64, tokens held.
        window: [E, L, H] int64, newest entries whose measured usage is not used.
        pool_kernel: odd; average over that many neighbours among the older keys, where
            neighbours outside count as zero. 1 does not pool.
        suffix_pad: what the newest entries hold, per (request, head): the "max" or
            "mean" of the pooled older ones, or 0 with "none". "global" is the maximum
            over all heads of all requests: it couples requests, so only comparisons
            with the authors' code should ask for it.

    Returns:
        [E, L, H, T], same dtype as `usage`; zero on padding.

    Raises:
        ValueError: unknown `suffix_pad`, or an even or non-positive `pool_kernel`.
    """
    check_pooling(pool_kernel, suffix_pad)
    position = torch.arange(usage.shape[-1], device=usage.device)
    num_older = (lengths - window)[..., None]
    is_older = position < num_older  # [E, L, H, T]
    is_newest = ~is_older & (position < lengths[..., None])
    older = torch.where(is_older, usage, 0.0)
    if pool_kernel > 1:
        flat = older.flatten(0, 1)
        flat = F.avg_pool1d(flat, pool_kernel, stride=1, padding=pool_kernel // 2)
        older = torch.where(is_older, flat.view_as(older), 0.0)
    if suffix_pad == "none":
        return older
    if suffix_pad == "mean":
        total = older.sum(-1, keepdim=True, dtype=torch.float64)
        value = (total / num_older.clamp(min=1)).to(usage.dtype)
    else:
        value = older.amax(-1, keepdim=True)
    if suffix_pad == "global":
        value = value.amax()
    return torch.where(is_newest, value, older)


pooled_usage = Operation(pooled_usage_ref)
