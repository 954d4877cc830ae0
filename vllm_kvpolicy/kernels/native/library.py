"""Loads the package's libraries of operators, which setup.py builds."""

import math
from pathlib import Path

import torch

from vllm_kvpolicy.kernels.native.sources import digest_of

PACKAGE = Path(__file__).parents[2]
_loaded: set[Path] = set()


def load_library(path: Path, sources: Path, kernels: str, how: str) -> None:
    """Register a library's operators in `torch.ops`, once per process.

    Args:
        path: of the library.
        sources: folder of its sources in a checkout; an installed package has none.
        kernels: what it holds, such as "CUDA kernels".
        how: how to build it, as the end of a sentence.

    Raises:
        ImportError: it was not built, or of other sources than the checkout has, or
            does not fit this PyTorch.
    """
    if path in _loaded:
        return
    if not path.exists():
        raise ImportError(
            f"vllm-kvpolicy was built without {kernels}; to build them, {how}"
        )
    if sources.is_dir() and digest_of(sources).encode() not in path.read_bytes():
        raise ImportError(
            f"the {kernels} of vllm-kvpolicy are of other sources than this checkout; "
            f"to build them again, {how}"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"cannot load the {kernels} of vllm-kvpolicy: {error.__cause__ or error}"
        ) from error
    _loaded.add(path)


def as_targets(
    target: torch.Tensor | int, shape: torch.Size
) -> tuple[torch.Tensor | None, int]:
    """Return the targets of rows as operators take them: of each, and of all alike.

    Args:
        target: integers that broadcast to `shape`, or a number for all rows.
        shape: leading axes of the rows.

    Returns:
        [R] int64 side by side and 0, or None and the number.
    """
    if isinstance(target, int):
        return None, target
    return target.long().expand(shape).contiguous().view(-1), 0


def as_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as a matrix, a view where each row's lie side by side.

    Args:
        numbers: [..., T], any dtype and strides.

    Returns:
        [R, T]; rows at any distance from each other, each row's numbers side by side.
    """
    rows = numbers.reshape(math.prod(numbers.shape[:-1]), numbers.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
