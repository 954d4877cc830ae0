"""Saves the queries of requests that are near an event.

Source: this project. Deviations: none.
"""

from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation


def save_rows_ref(saved: Tensor, values: Tensor, targets: Tensor) -> None:
    """Copy part g of row t of `values` to row `targets[t, g]` of `saved`.

    A row has G parts, because a query is as long as the keys of G tokens and may begin
    in one superblock and end in another.

    Args:
        saved: [C, P] model dtype, contiguous, mutated. Row 0 collects what is not
            wanted; its content is unspecified.
        values: [T, G * P] model dtype, rows contiguous.
        targets: [T or more, G] int64 below C, no row but 0 twice.
    """
    num_rows, num_parts = len(values), targets.shape[1]
    parts = values.reshape(num_rows * num_parts, -1)
    saved.index_copy_(0, targets[:num_rows].flatten(), parts)


save_rows = Operation(save_rows_ref)
