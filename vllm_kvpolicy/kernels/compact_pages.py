"""Move kept tokens to their places.

Called by attention.compaction with a batch of events, for keys and for values.
Process: worker

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.dispatch import Operation

CHUNK_TOKENS = 2**16


def compact_pages_ref(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
    first: torch.Tensor,
    in_place: torch.Tensor | None = None,
) -> None:
    """Copy tokens between pages; nothing is overwritten before it is read.

    Tokens that stay on their head's own page in the same place of its list are copied
    in place, chunk by chunk: a head's survivors ascend, so each destination is at or
    before its source. Only tokens that change pages pass through scratch memory.

    Args:
        pages: [P, N, D] model dtype, any strides, mutated: keys or values.
        source_slots: [M] int64, page * N + offset of each survivor, ascending within
            each head.
        dest_slots: [M] int64, page * N + offset; no slot twice, but for survivors that
            do not exist, which move slot 0 of vLLM's unused null block onto itself.
        first: [rows + 1] int64, where each head's survivors start, ascending from 0 to
            M. Survivors that do not exist have rows of their own.
        in_place: [M] bool; None where it holds for all.

    Exact: moves are bitwise.
    """
    if in_place is None:
        _copy_in_place(pages, source_slots, dest_slots)
        return
    # A device kernel copies changed pages one by one instead of sizing a scratch.
    changed = (~in_place).nonzero().flatten()  # sync-ok: heads of own lengths only
    scratch = _read(pages, source_slots[changed])
    _copy_in_place(
        pages,
        torch.where(in_place, source_slots, 0),
        torch.where(in_place, dest_slots, 0),
    )
    _write(pages, dest_slots[changed], scratch)


compact_pages = Operation(compact_pages_ref)


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
