"""Twin in Triton of kernels.save_rows: one program per row and run of its numbers."""

import torch
import triton
import triton.language as tl

NUMBERS = 1024  # of a program


def save_rows(saved: torch.Tensor, values: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy rows to their targets; see the reference.

    A program whose row is not kept ends after one load.
    """
    size = saved[0].numel()
    _save_rows[(len(values), triton.cdiv(size, NUMBERS))](
        saved,
        values,
        targets,
        values.stride(0),
        len(saved) - 1,
        size,
        NUMBERS=NUMBERS,
    )


@triton.jit(do_not_specialize=["num_saved", "size"])
def _save_rows(
    saved,  # [C + 1, size]
    values,  # [T, size]
    targets,  # [T] int64
    values_stride: tl.int64,
    num_saved,  # C
    size,
    NUMBERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target < num_saved:
        number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
        is_number = number < size
        kept = tl.load(values + row * values_stride + number, mask=is_number)
        tl.store(saved + target * size + number, kept, mask=is_number)
