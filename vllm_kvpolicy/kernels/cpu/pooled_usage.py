"""Smooths the window's attention over neighbours, and gives the newest keys a value.

Source: csrc/cpu/mass.cpp. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load
from vllm_kvpolicy.kernels.native.library import as_rows
from vllm_kvpolicy.kernels.pooled_usage import check_pooling, pooled_usage_ref


def pooled_usage(
    usage: torch.Tensor,
    lengths: torch.Tensor,
    window: torch.Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> torch.Tensor:
    """Smooth the usage of the older keys and give the newest ones a value.

    Exact; see `kernels.pooled_usage.pooled_usage_ref`. The reference computes a
    `suffix_pad` of "mean", whose sum has an order of its own, and of "global", which
    couples rows and is for comparisons.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: `usage` is not float32, or a tensor has another size or device.
    """
    check_pooling(pool_kernel, suffix_pad)
    if suffix_pad in ("mean", "global"):
        return pooled_usage_ref(usage, lengths, window, pool_kernel, suffix_pad)
    load()
    pooled = usage.new_empty(usage.shape)
    torch.ops.vllm_kvpolicy_cpu.pooled_usage(
        as_rows(pooled),
        as_rows(usage),
        lengths.reshape(-1),
        window.reshape(-1),
        pool_kernel,
        suffix_pad == "max",
    )
    return pooled
