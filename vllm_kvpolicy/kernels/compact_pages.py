"""Move kept tokens to their places, head by head.

Called by attention.compaction, for keys and values of each layer with a batch
of events.
Process: worker
"""

import torch


def compact_pages_ref(
    pages: torch.Tensor,
    source_slots: torch.Tensor,
    dest_slots: torch.Tensor,
) -> None:
    """Copy tokens within one layer's pages; every source is read before any write.

    Sources and destinations may overlap in any way and destinations may be disjoint
    from sources; a faster kernel may need an order (survivors ascending, destination at
    or before the source), this reference does not.

    Args:
        pages: [B, H, N, D] model dtype, any strides, mutated: keys or values.
        source_slots: [E, H, C] int64, superblock * N + offset of each survivor.
        dest_slots: [E, C] int64, superblock * N + offset; no slot twice.

    Exact: moves are bitwise.
    """
    block_size = pages.shape[2]
    head = torch.arange(pages.shape[1], device=pages.device)[:, None]
    dest = dest_slots[:, None]
    moved = pages[source_slots // block_size, head, source_slots % block_size]
    pages[dest // block_size, head, dest % block_size] = moved
