"""Merges dropped tokens into the survivors that a policy has paired them with."""

import torch

from vllm_kvpolicy.kernels.compact_pages import Moves, merge_pages
from vllm_kvpolicy.worker.batch import Choice, Destinations, HeldPages
from vllm_kvpolicy.worker.pages import PagePool


def merge_dropped(
    pool: PagePool,
    held: HeldPages,
    destinations: Destinations,
    choice: Choice,
    moves: Moves,
) -> None:
    """Rewrite keys and values of the survivors whose partner is gone.

    A partner that was kept after all, to fill a page, is not merged.

    Args:
        pool: the group's keys and values, mutated.
        held: what was held.
        destinations: where it went.
        choice: the policy's pairs, and keys and values from before the move.
        moves: from slot to slot.
    """
    placed, inputs, merge = destinations.sources, choice.inputs, choice.decision.merge
    assert merge is not None
    index = placed.clamp_min(0)
    partner = merge.partner.flatten(1).gather(1, index)
    other = index - index % held.max_tokens + partner.clamp_min(0)
    size = merge.partner[0].numel()
    survives = torch.zeros(len(placed), size + 1, dtype=torch.bool, device=index.device)
    survives = survives.scatter(1, torch.where(placed < 0, size, placed), True)
    is_merged = (placed >= 0) & (partner >= 0) & ~survives.gather(1, other)
    weight = torch.where(is_merged, merge.weight.flatten(1).gather(1, index), 1.0)
    layer = index // (held.max_tokens * pool.num_heads)
    for group in range(pool.num_groups):
        slots = moves.dest[group].flatten()
        others, weights, layers = (
            row.unflatten(1, (pool.num_groups, -1))[:, group]
            for row in (other, weight, layer)
        )
        for name, pages in (("keys", pool.keys), ("values", pool.values)):
            before = inputs.given(name).flatten(1, 3)
            taken = torch.take_along_dim(before, others[..., None], dim=1)
            rows = slots, taken.flatten(0, 1), weights.flatten()
            merge_pages(pages[group], *rows, pool.scales(name, layers.flatten()))
