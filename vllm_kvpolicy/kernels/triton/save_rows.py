"""Twin in Triton of kernels.save_rows: one program per row, part and run of numbers."""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 1024  # of a program


def save_rows(saved: Tensor, values: Tensor, targets: Tensor) -> None:
    """A program whose part is not wanted ends after one load."""
    num_parts, size = targets.shape[1], saved.shape[1]
    _save_rows[(len(values), num_parts, triton.cdiv(size, NUMBERS))](
        saved, values, targets, values.stride(0), num_parts, size, NUMBERS=NUMBERS
    )


@triton.jit(do_not_specialize=["num_parts", "size"])
def _save_rows(
    saved, values, targets, values_stride: tl.int64, num_parts, size,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(targets + row * num_parts + part)
    if target > 0:
        number = tl.program_id(2) * NUMBERS + tl.arange(0, NUMBERS)
        is_number = number < size
        source = values + row * values_stride + part * size
        kept = tl.load(source + number, mask=is_number)
        tl.store(saved + target * size + number, kept, mask=is_number)
