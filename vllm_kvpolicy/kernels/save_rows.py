"""Saves the queries of requests that are near an event.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.dispatch import Operation


def save_rows_ref(
    saved: torch.Tensor, values: torch.Tensor, targets: torch.Tensor
) -> None:
    """Copy row t of `values` to row `targets[t]` of `saved`.

    Args:
        saved: [C + 1, Hq, D] model dtype, contiguous, mutated. The last row
            collects the values that are not wanted; its content is unspecified.
        values: [T, Hq, D] model dtype, rows contiguous.
        targets: [T or more] int64, 0..C - 1, no row twice, or C for values that are not
            wanted.
    """
    saved.index_copy_(0, targets[: len(values)], values)


save_rows = Operation(save_rows_ref)
