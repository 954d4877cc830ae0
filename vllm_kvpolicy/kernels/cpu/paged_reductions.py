"""Norms and squares of keys and values, read from the pages.

Source: csrc/cpu/paged_reductions.cpp says how. Deviations from the reference, all of
them rounding: the order in which products are added up. A row's results depend on
nothing but its own tokens.
"""

from typing import Any

import torch

from vllm_kvpolicy.kernels.cpu.library import load
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.paged_reductions import check_squares


def paged_norms(tokens: PagedTokens, lengths: torch.Tensor) -> torch.Tensor:
    """Measure how long each key or value is; see the reference.

    Raises:
        ImportError: the kernels were not built.
    """
    load()
    norms = lengths.new_zeros(tokens.shape[:4], dtype=torch.float32)
    _by_pool(torch.ops.vllm_kvpolicy_cpu.paged_norms, norms, tokens, lengths)
    return norms


def paged_quadratics(
    keys: PagedTokens,
    lengths: torch.Tensor,
    directions: torch.Tensor,
    matrices: torch.Tensor,
) -> torch.Tensor:
    """Give each key k the value directions . k + k . matrices k of each query head.

    See the reference. Of the matrices only the half on and right of the diagonal is
    read.

    Raises:
        ImportError: the kernels were not built.
        ValueError: shapes that do not fit together.
    """
    load()
    check_squares(keys, directions, matrices)
    shape = (*directions.shape[:3], keys.num_tokens)
    values = lengths.new_zeros(shape, dtype=torch.float32)
    operator = torch.ops.vllm_kvpolicy_cpu.paged_quadratics
    given = directions.contiguous(), matrices.contiguous()
    _by_pool(operator, values, keys, lengths, *given)
    return values


def _by_pool(
    operator: Any,
    result: torch.Tensor,
    tokens: PagedTokens,
    lengths: torch.Tensor,
    *given: torch.Tensor,
) -> None:
    """Call an operator once for all layers that share a view of the pool."""
    for layers, pool in tokens.by_pool():
        pages, own = tokens.pages[:, layers], lengths[:, layers]
        parts = (each[:, layers] for each in given)
        operator(result[:, layers], pool, pages, own, *parts)
