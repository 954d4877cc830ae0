"""Selects the best tokens of each row, a thread block per row.

Source: csrc/include/kvpolicy/radix_select.cuh names it. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cuda.library import load
from vllm_kvpolicy.kernels.native.library import as_rows, as_targets


def top_k_mask(
    score: torch.Tensor,
    must_keep: torch.Tensor,
    valid: torch.Tensor,
    budget: torch.Tensor | int,
) -> torch.Tensor:
    """Keep the must-keep tokens and the best of the others, `budget` in all.

    Exact; see `kernels.ranking.top_k_mask_ref`. Leading axes may be any.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(tokens) for tokens in (score, must_keep, valid)]
    torch.ops.vllm_kvpolicy.top_k_mask(
        as_rows(marked), *rows, *as_targets(budget, score.shape[:-1])
    )
    return marked
