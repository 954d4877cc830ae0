"""Moves survivors to their places after an event.

Source: this project. Deviations: none.
"""

from collections.abc import Iterator

import torch

from vllm_kvpolicy.kernels.dispatch import Operation

CHUNK_TOKENS = 2**16
SCRATCH_BYTES = 2**28
MIN_COLUMNS = 32


def compact_pages_ref(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; nothing is overwritten before it is read.

    Example: with N = 4, a survivor at offset 2 of page 5 has the source slot 22; to
    become the first of page 3 it has the destination slot 12.

    >>> pages = torch.arange(32.0).view(8, 4, 1)
    >>> source, dest, first = map(torch.tensor, ([22], [12], [0, 1]))
    >>> compact_pages_ref(pages, source, dest, first)
    >>> pages[3, 0]
    tensor([22.])

    Tokens that stay on their head's own page in the same place of its list are copied
    in place, chunk by chunk: a head's survivors ascend, so each destination is at or
    before its source. Only tokens that change pages pass through scratch memory.

    Args:
        pages: [P, N, D] model dtype, any strides, mutated: keys or values.
        source_slots: [M] int64, page * N + offset of each survivor, ascending within
            each head.
        dest_slots: [M] int64, page * N + offset; no slot twice except for padding,
            which moves slot 0 of vLLM's unused null block onto itself.
        first: [rows + 1] int64, where each head's survivors start, ascending from 0 to
            M. Padding has rows of its own; a row whose first source is slot 0 is
            padding.
        in_place: [M] bool; None where it holds for all.

    Exact: moves are bitwise.
    """
    if in_place is None:
        _copy_in_place(pages, source_slots, dest_slots)
        return
    # The twins have a scratch of fixed size instead.
    stays = in_place.nonzero().flatten()  # sync-ok: the reference of a CPU
    num_changed = len(in_place) - len(stays)
    changed = torch.nonzero_static(~in_place, size=num_changed).flatten()
    scratch = _read(pages, source_slots[changed])
    _copy_in_place(pages, source_slots[stays], dest_slots[stays])
    _write(pages, dest_slots[changed], scratch)


compact_pages = Operation(compact_pages_ref)


def column_slices(
    pages: torch.Tensor, num_moves: int, with_scratch: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Cut tokens into slices of columns that a twin moves one after the other.

    Columns move independently of each other, so slices bound the scratch: it stays
    below `SCRATCH_BYTES` where halves of whole `MIN_COLUMNS` are narrow enough.

    Args:
        pages: [P, N, D], tokens at equal distances, as in a pool's keys or values.
        num_moves: M.
        with_scratch: some tokens may pass through scratch memory.

    Yields:
        Slots [P * N, d], a view of `pages`, and scratch [M, d] with anything in it;
        None without it.

    Raises:
        ValueError: a token's numbers are not side by side, or tokens not at equal
            distances.
    """
    num_pages, block_size, width = pages.shape
    distance = pages.stride(1)
    if pages.stride(2) != 1 or pages.stride(0) != block_size * distance:
        raise ValueError(
            "pages: expected contiguous channels and a constant stride between "
            f"tokens, got shape {tuple(pages.shape)} and strides {pages.stride()}"
        )
    slots = pages.as_strided((num_pages * block_size, width), (distance, 1))
    scratch = None
    if with_scratch:
        column_bytes = num_moves * pages.element_size()
        while width * column_bytes > SCRATCH_BYTES and width % (2 * MIN_COLUMNS) == 0:
            width //= 2
        scratch = pages.new_empty(num_moves, width)
    for columns in slots.split(width, dim=-1):
        yield columns, scratch


def _copy_in_place(
    pages: torch.Tensor, source_slots: torch.Tensor, dest_slots: torch.Tensor
) -> None:
    for start in range(0, len(source_slots), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        _write(pages, dest_slots[chunk], _read(pages, source_slots[chunk]))


def _read(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    block_size = pages.shape[1]
    return pages[slots // block_size, slots % block_size]


def _write(pages: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    block_size = pages.shape[1]
    pages[slots // block_size, slots % block_size] = tokens
