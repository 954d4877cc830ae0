"""Twin of kernels.pooled_usage: a program per row, which walks it twice."""

import torch
import triton
import triton.language as tl

from vllm_kvpolicy.kernels.pooled_usage import check_pooling, pooled_usage_ref

TILE = 1024  # tokens that a program holds at a time


def pooled_usage(
    usage: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> torch.Tensor:
    """Smooth the usage of the older keys and give the newest ones a value.

    Equal up to rounding. A `suffix_pad` of "global", which couples rows, is for
    comparisons: the reference computes it.
    """
    check_pooling(pool_kernel, suffix_pad)
    if suffix_pad == "global":
        return pooled_usage_ref(usage, lengths, window, pool_kernel, suffix_pad)
    pooled = torch.empty_like(usage, memory_format=torch.contiguous_format)
    num_tokens = usage.shape[-1]
    _pooled_usage[(lengths.numel(),)](
        usage.contiguous(),
        lengths.contiguous(),
        window.contiguous(),
        pooled,
        num_tokens,
        POOL=pool_kernel,
        PAD=suffix_pad,
        TILE=TILE,
    )
    return pooled


@triton.jit(do_not_specialize=["num_tokens"])
def _pooled_usage(
    usage,  # [R, T] floating point
    lengths,  # [R] int64
    window,  # [R] int64
    pooled,  # [R, T], the same dtype, written
    num_tokens,
    POOL: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Pool one row; what its newest keys get is known at the end of the first walk."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_tokens
    length = tl.load(lengths + row)
    num_older = length - tl.load(window + row)
    highest = tl.full((), 0.0, usage.dtype.element_ty)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        mean = _mean(usage + start, token, num_older, POOL)
        is_older = token < num_older
        highest = tl.maximum(highest, tl.max(tl.where(is_older, mean, 0.0)))
        total += tl.sum(tl.where(is_older, mean, 0.0).to(tl.float64))
        padding = is_older | ((token >= length) & (token < num_tokens))
        mean = tl.where(is_older, mean, 0.0)
        tl.store(pooled + start + token, mean, mask=padding & (token < num_tokens))
    value = highest
    if PAD == "mean":
        value = (total / tl.maximum(num_older, 1).to(tl.float64)).to(value.dtype)
    if PAD == "none":
        value = highest * 0.0
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        is_newest = (token >= num_older) & (token < length)
        newest = tl.full((TILE,), 0.0, value.dtype) + value
        tl.store(pooled + start + token, newest, mask=is_newest)


@triton.jit
def _mean(usage, token, num_older, POOL: tl.constexpr):
    """Average the older neighbours; those outside count as zero."""
    total = tl.load(usage + token, mask=token < 0, other=0.0)
    for step in tl.static_range(POOL):
        other = token + (step - POOL // 2)
        is_older = (other >= 0) & (other < num_older)
        total += tl.load(usage + other, mask=is_older, other=0.0)
    return total / POOL
