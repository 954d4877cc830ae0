"""Loads the package's CUDA kernels, which setup.py builds where it finds a compiler."""

import math
from pathlib import Path

import torch

LIBRARY = Path(__file__).parents[2] / "_C.abi3.so"
_loaded: set[Path] = set()


def load() -> None:
    """Register the operators `torch.ops.vllm_kvpolicy`, once.

    Raises:
        ImportError: the kernels were not built, or do not fit this PyTorch.
    """
    if LIBRARY in _loaded:
        return
    if not LIBRARY.exists():
        raise ImportError(
            "vllm-kvpolicy was built without CUDA kernels; to build them, install "
            "nvcc and PyTorch for CUDA and run `KVPOLICY_CUDA=1 pip install "
            "--no-build-isolation --no-deps .` in a checkout"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"cannot load the CUDA kernels of vllm-kvpolicy: {error.__cause__ or error}"
        ) from error
    _loaded.add(LIBRARY)


def as_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as a matrix, a view where each row's lie side by side.

    Args:
        numbers: [..., T], any dtype and strides.

    Returns:
        [R, T]; rows at any distance from each other, each row's numbers side by side.
    """
    rows = numbers.reshape(math.prod(numbers.shape[:-1]), numbers.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
