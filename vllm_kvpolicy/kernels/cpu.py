"""Twins in C++ for CPUs, of csrc/cpu: they take and return what their references do.

Exact where nothing else is said; rows may have any leading axes. The kernels are
compiled for several kinds of a CPU, of which one is chosen when they run. An
ImportError says that they were not built, a RuntimeError that a tensor has another
dtype, size or device.
Source: this project. Deviations, all of them rounding, in `window_usage`, `paged_norms`
and `paged_quadratics` alone: the order in which products are added up and, in the
first, the exponential, and a product with one over the sum of weights in place of a
quotient. A row's results depend on nothing but its own queries and keys.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.compact_pages import Moves, slice_width
from vllm_kvpolicy.kernels.libraries import CPU
from vllm_kvpolicy.kernels.nucleus import nucleus_counts
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.paged_reductions import check_squares
from vllm_kvpolicy.kernels.segment_quota import (
    SegmentQuotas,
    check_exact,
    max_segments,
    num_thresholds,
)
from vllm_kvpolicy.kernels.softmax import effective_window
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    check_window,
    pooled_usage_ref,
)

# -- what keys say ---------------------------------------------------------------------


def window_usage(
    queries: Tensor,
    keys: PagedTokens,
    lengths: Tensor,
    scale: float,
    mass: float | None = None,
    sink_logits: Tensor | None = None,
) -> WindowUsage:
    """Weights of all queries are never stored; nuclei are the reference's.

    Queries and pools may have any strides and are not copied.
    """
    measure = CPU.load().window_usage
    check_window(queries, keys, mass, sink_logits)
    shape = (*queries.shape[:3], keys.num_tokens)
    mean, last = (queries.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    for layers, pool in keys.by_pool():
        found, rows = (mean, last, queries), (keys.pages, lengths)
        measure(
            *(each[:, layers] for each in found),
            pool,
            *(each[:, layers] for each in rows),
            scale,
            None if sink_logits is None else sink_logits[layers].contiguous(),
        )
    counts: tuple[Tensor, ...] = ()
    if mass is not None:
        counts = (nucleus_counts(queries, keys.dense, lengths, scale, mass),)
    window = effective_window(lengths, queries.shape[3])
    return WindowUsage(mean, last, lengths, window, *counts)


def pooled_usage(
    usage: Tensor,
    lengths: Tensor,
    window: Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> Tensor:
    """Pad with "max" or nothing; the reference does "mean"."""
    if suffix_pad == "mean":
        return pooled_usage_ref(usage, lengths, window, pool_kernel, suffix_pad)
    pooled = usage.new_empty(usage.shape)
    rows = as_rows(pooled), as_rows(usage), lengths.reshape(-1), window.reshape(-1)
    CPU.load().pooled_usage(*rows, pool_kernel, suffix_pad == "max")
    return pooled


def paged_norms(tokens: PagedTokens, lengths: Tensor) -> Tensor:
    norms = lengths.new_zeros(tokens.shape[:4], dtype=torch.float32)
    _by_pool(CPU.load().paged_norms, norms, tokens, lengths)
    return norms


def paged_quadratics(
    keys: PagedTokens, lengths: Tensor, directions: Tensor, matrices: Tensor
) -> Tensor:
    """Of the matrices only the half on and right of the diagonal is read."""
    check_squares(keys, directions, matrices)
    shape = (*directions.shape[:3], keys.num_tokens)
    values = lengths.new_zeros(shape, dtype=torch.float32)
    given = directions.contiguous(), matrices.contiguous()
    _by_pool(CPU.load().paged_quadratics, values, keys, lengths, *given)
    return values


def _by_pool(
    operator: Any, result: Tensor, tokens: PagedTokens, lengths: Tensor, *given: Tensor
) -> None:
    """Call an operator once for all layers that share a view of the pool."""
    for layers, pool in tokens.by_pool():
        pages, own = tokens.pages[:, layers], lengths[:, layers]
        parts = (each[:, layers] for each in given)
        operator(result[:, layers], pool, pages, own, *parts)


# -- which tokens a row keeps ----------------------------------------------------------


def must_keep_tokens(
    num_pages: Tensor,
    num_local: Tensor,
    sinks: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    lengths = num_pages.new_empty(num_pages.shape)
    must_keep = num_pages.new_empty((*num_pages.shape, num_tokens), dtype=torch.bool)
    CPU.load().must_keep_tokens(
        lengths, must_keep, num_pages.contiguous(), num_local, sinks, block_size
    )
    return lengths, must_keep


def limit_must_keep(must_keep: Tensor, budget: int) -> Tensor:
    kept = torch.empty_like(must_keep, memory_format=torch.contiguous_format)
    CPU.load().limit_must_keep(as_rows(kept), as_rows(must_keep), budget)
    return kept


def fill_next_best(
    keep: Tensor, score: Tensor, valid: Tensor, target: Tensor | int
) -> Tensor:
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(tokens) for tokens in (marked, keep, score, valid)]
    targets, alike = None, target
    if isinstance(target, Tensor):
        targets = target.long().expand(score.shape[:-1]).contiguous().view(-1)
        alike = 0
    CPU.load().fill_next_best(*rows, targets, alike)
    return marked


def top_k_mask(
    score: Tensor, must_keep: Tensor, valid: Tensor, budget: Tensor | int
) -> Tensor:
    return fill_next_best(must_keep & valid, score, valid, budget)


def resize(
    keep: Tensor,
    score: Tensor,
    must_keep: Tensor,
    num_pages: Tensor,
    quota: Tensor,
    block_size: int,
) -> Tensor:
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(tokens) for tokens in (marked, keep, score, must_keep)]
    counts = [each.reshape(-1).contiguous() for each in (num_pages, quota)]
    CPU.load().resize(*rows, *counts, block_size)
    return marked


def credited_mass(
    usage: Tensor, lengths: Tensor, credit: Tensor | None, decay: float, mix: float
) -> tuple[Tensor, Tensor]:
    mass = usage.new_empty(usage.shape, dtype=torch.float64)
    updated = usage.new_empty(usage.shape, dtype=torch.float32)
    rows = as_rows(usage), lengths.contiguous()
    old = None if credit is None else as_rows(credit)
    CPU.load().credited_mass(mass, updated, *rows, old, decay, mix)
    return mass, updated


def segment_quota(
    mass: Tensor,
    lengths: Tensor,
    exempt: Tensor,
    total: Tensor,
    *,
    segment_mass: float,
    min_segment: int,
    max_segment: int,
    min_quota: int,
    by_mass: bool = True,
) -> SegmentQuotas:
    check_exact(mass)
    num_rows, num_tokens = mass.shape
    bound = max_segments(num_tokens, segment_mass, min_segment, max_segment)
    segments = mass.new_empty((num_rows, bound, 2))
    quotas = mass.new_empty((num_rows, bound))
    segment_of = mass.new_empty((num_rows, num_tokens))
    CPU.load().segment_quota(
        *(segments.flatten(1), quotas, segment_of),
        *(as_rows(mass), lengths[:, None], as_rows(exempt), total[:, None]),
        *(segment_mass, num_thresholds(segment_mass)),
        *(min_segment, max_segment, min_quota, by_mass),
    )
    return SegmentQuotas(segments, quotas, segment_of)


def pick_by_quota(score: Tensor, group: Tensor, quotas: Tensor) -> Tensor:
    marked = score.new_empty(score.shape, dtype=torch.bool)
    rows = [as_rows(numbers) for numbers in (marked, score, group, quotas)]
    CPU.load().pick_by_quota(*rows)
    return marked


# -- where survivors go ----------------------------------------------------------------


def list_survivors(
    survives: Tensor, first: Tensor, num_places: int, block_size: int
) -> Tensor:
    listed = first.new_empty(len(survives), num_places)
    rows = survives.contiguous(), first.contiguous()
    CPU.load().list_survivors(listed, *rows, block_size)
    return listed


def survivor_moves(
    sources: Tensor,
    held: Tensor,
    first: Tensor,
    pages: Tensor,
    unmoved: Tensor | None,
    num_tokens: int,
    block_size: int,
) -> Moves:
    source, dest = (sources.new_empty(sources.shape) for _ in range(2))
    starts = sources.new_empty(len(held) * (held.shape[1] + 1) + 1)
    in_place = None
    if unmoved is not None:
        in_place = torch.empty_like(source, dtype=torch.bool)
        unmoved = unmoved.contiguous()
    lists = (each.contiguous() for each in (sources, held, first, pages))
    CPU.load().survivor_moves(
        source, dest, starts, in_place, *lists, unmoved, num_tokens, block_size
    )
    return Moves(source, dest, starts, in_place)


def compact_pages(
    pages: Tensor,
    source_slots: Tensor,
    dest_slots: Tensor,
    first: Tensor,
    in_place: Tensor | None = None,
) -> None:
    """Pages have numbers of 1, 2, 4 or 8 bytes; the lists of moves are contiguous."""
    move = CPU.load().compact_pages
    moves = source_slots, dest_slots, first, in_place
    scratch, width = None, pages.shape[-1]
    if in_place is not None:
        width = slice_width(pages, len(source_slots))
        scratch = pages.new_empty(len(source_slots), width)
    for columns in pages.split(width, dim=-1):
        move(columns, *moves, scratch)


def read_survivors(
    survivors: Tensor,
    local: Tensor,
    which: Tensor,
    index: Tensor,
    first: Tensor,
    global_blocks: Tensor,
    num_tokens: int,
) -> Tensor:
    found = survivors.new_empty(len(which), len(index), local.shape[2], num_tokens)
    rows = which, index, first.long().contiguous(), global_blocks
    CPU.load().read_survivors(found, survivors, local, *rows)
    return found


def write_survivors(
    survivors: Tensor,
    local: Tensor,
    which: Tensor,
    index: Tensor,
    values: Tensor,
    sources: Tensor,
    num_pages: Tensor,
    num_local: Tensor,
    global_blocks: Tensor,
) -> None:
    rows = (each.contiguous() for each in (values, sources, num_pages))
    CPU.load().write_survivors(
        survivors, local, which, index, *rows, num_local, global_blocks
    )


def as_rows(numbers: Tensor) -> Tensor:
    """Return numbers as a matrix, a view where each row's lie side by side.

    Args:
        numbers: [..., T], any dtype and strides.

    Returns:
        [R, T]; rows at any distance from each other, each row's numbers side by side.
    """
    rows = numbers.reshape(math.prod(numbers.shape[:-1]), numbers.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
