"""Selects the best tokens of each row.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.cpu.library import load
from vllm_kvpolicy.kernels.native.library import as_rows, as_targets


def fill_next_best(
    keep: torch.Tensor,
    score: torch.Tensor,
    valid: torch.Tensor,
    target: torch.Tensor | int,
) -> torch.Tensor:
    """Add the best tokens that are not kept yet until a row keeps `target`.

    Exact; see `kernels.ranking.fill_next_best_ref`. Leading axes may be any.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(tokens) for tokens in (marked, keep, score, valid)]
    torch.ops.vllm_kvpolicy_cpu.fill_next_best(
        *rows, *as_targets(target, score.shape[:-1])
    )
    return marked


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
    return fill_next_best(must_keep & valid, score, valid, budget)


def resize(
    keep: torch.Tensor,
    score: torch.Tensor,
    must_keep: torch.Tensor,
    num_pages: torch.Tensor,
    quota: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Fill up or trim a selection of a row's first pages to whole pages.

    Exact; see `kernels.ranking.resize_ref`. Leading axes may be any.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(tokens) for tokens in (marked, keep, score, must_keep)]
    counts = [each.reshape(-1).contiguous() for each in (num_pages, quota)]
    torch.ops.vllm_kvpolicy_cpu.resize(*rows, *counts, block_size)
    return marked


def limit_must_keep(must_keep: torch.Tensor, budget: int) -> torch.Tensor:
    """Shrink a must-keep set that exceeds the budget: recent tokens go before sinks.

    Exact; see `kernels.ranking.limit_must_keep_ref`. Leading axes may be any.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    kept = torch.empty_like(must_keep, memory_format=torch.contiguous_format)
    rows = as_rows(kept), as_rows(must_keep)
    torch.ops.vllm_kvpolicy_cpu.limit_must_keep(*rows, budget)
    return kept


def must_keep_tokens(
    num_pages: torch.Tensor,
    num_local: torch.Tensor,
    sinks: torch.Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mark the tokens that an event keeps in any case: sinks and local ones.

    Exact; see `kernels.ranking.must_keep_tokens_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    lengths = num_pages.new_empty(num_pages.shape)
    must_keep = num_pages.new_empty((*num_pages.shape, num_tokens), dtype=torch.bool)
    torch.ops.vllm_kvpolicy_cpu.must_keep_tokens(
        lengths, must_keep, num_pages.contiguous(), num_local, sinks, block_size
    )
    return lengths, must_keep
