"""Picks the best tokens of each group of a row, a thread block per row.

Source: csrc/include/kvpolicy/radix_select.cuh names it. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cuda.library import load
from vllm_kvpolicy.kernels.native.library import as_rows


def pick_by_quota(
    score: torch.Tensor, group: torch.Tensor, quotas: torch.Tensor
) -> torch.Tensor:
    """Mark the best tokens of each group, as many as its quota.

    Exact; see `kernels.segment_quota.pick_by_quota_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(numbers) for numbers in (marked, score, group, quotas)]
    torch.ops.vllm_kvpolicy.pick_by_quota(*rows)
    return marked
