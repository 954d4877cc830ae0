"""Moves kept tokens to their places, heads side by side.

Source: csrc/cpu/compact_pages.cpp and survivors.cpp. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.compact_pages import Moves, slice_width
from vllm_kvpolicy.kernels.cpu.library import load


def compact_pages(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; see `kernels.compact_pages`.

    Args:
        pages: [P, N, D] of 1, 2, 4 or 8 bytes, any strides, mutated.
        source_slots: [M] int64, contiguous, like those that follow.
        dest_slots: [M] int64.
        first: [rows + 1] int64.
        in_place: [M] bool; None where it holds for all.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.

    Exact: moves are bitwise.
    """
    load()
    moves = source_slots, dest_slots, first, in_place
    scratch, width = None, pages.shape[-1]
    if in_place is not None:
        width = slice_width(pages, len(source_slots))
        scratch = pages.new_empty(len(source_slots), width)
    for columns in pages.split(width, dim=-1):
        torch.ops.vllm_kvpolicy_cpu.compact_pages(columns, *moves, scratch)


def list_survivors(
    survives: torch.Tensor, first: torch.Tensor, num_places: int, block_size: int
) -> torch.Tensor:
    """List the survivors of every head, oldest first.

    Exact; see `kernels.compact_pages.list_survivors_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    listed = first.new_empty(len(survives), num_places)
    rows = survives.contiguous(), first.contiguous()
    torch.ops.vllm_kvpolicy_cpu.list_survivors(listed, *rows, block_size)
    return listed


def survivor_moves(
    sources: torch.Tensor,
    held: torch.Tensor,
    first: torch.Tensor,
    pages: torch.Tensor,
    unmoved: torch.Tensor | None,
    num_tokens: int,
    block_size: int,
    groups: int,
) -> Moves:
    """Say from which slot to which one each survivor goes.

    Exact; see `kernels.compact_pages.survivor_moves_ref`.

    Raises:
        ImportError: the kernels were not built.
        RuntimeError: a tensor has another dtype, size or device.
    """
    load()
    (num_events, num_places), num_heads = sources.shape, held.shape[1]
    source = sources.new_empty(groups, num_events, num_places // groups)
    dest = torch.empty_like(source)
    num_rows = num_events * (num_heads // groups + 1)
    starts = sources.new_empty(groups, num_rows + 1)
    in_place = None
    if unmoved is not None:
        in_place = torch.empty_like(source, dtype=torch.bool)
        unmoved = unmoved.contiguous()
    lists = (each.contiguous() for each in (sources, held, first, pages))
    torch.ops.vllm_kvpolicy_cpu.survivor_moves(
        source, dest, starts, in_place, *lists, unmoved, num_tokens, block_size
    )
    return Moves(source, dest, starts, in_place)
