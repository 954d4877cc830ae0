"""Defines the measures of what events keep.

Axes: L layers, H KV heads, P logical positions, n tokens of one row, N tokens per
superblock. A head *keeps* what it holds after an event: survivors of its pool and local
tokens.

Source: AMS (arXiv 2605.23200) names IoU, wipe-outs, bursts and retention
without defining them, so the definitions are ours; memory-time is Hard-KV's.
"""

import numpy as np

from vllm_kvpolicy.observe.trace_files import EventRecord


def mask_of(rows: np.ndarray, num_positions: int) -> np.ndarray:
    """Return a mask [L, H, P] of positions: [0, 2, -1] of 4 are the first and third.

    Args:
        rows: [L, H, T] positions below `num_positions`, P; negative ones are padding.
    """
    mask = np.zeros((*rows.shape[:2], num_positions + 1), bool)
    np.put_along_axis(mask, np.where(rows < 0, num_positions, rows), True, axis=-1)
    return mask[..., :-1]


def kept_mask(event: EventRecord) -> np.ndarray:
    """Return which tokens each head keeps, [L, H, position] bool."""
    mask = mask_of(event.survivors, event.position)
    mask[..., : event.pinned] = mask[..., event.frontier :] = True
    return mask


def overlap(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare what two consecutive events keep.

    If both events keep a random half of the tokens, the IoU is 1/3. If both keep
    equally many, it is s / (2 - s) for a survival s.

    Args:
        before, after: tokens that each keeps, [..., P] and [..., at least P] bool.

    Returns:
        IoU = |before and after| / |before or after| and survival = |before and after| /
        |before|, [...] each.
    """
    both = (before & after[..., : before.shape[-1]]).sum(-1)
    size = before.sum(-1)
    return both / (size + after.sum(-1) - both), both / size


def wiped_regions(kept: np.ndarray, size: int, percent: float) -> tuple[int, int]:
    """Return how many regions of rows [..., n] are wiped out, and how many there are.

    A row is cut into regions of `size` tokens from its start; a shorter rest at its
    end is ignored. A region is wiped out if at most `percent` % of its tokens are kept:
    with size 2 and 0 %, the row 1 0 0 0 1 has 1 of 2. If the row has the held tokens in
    time order, the share of wiped regions is the wipe-out rate of one event; if it has
    all positions, it is the share of the text that is gone.
    """
    count = kept.shape[-1] // size
    regions = kept[..., : count * size].reshape(*kept.shape[:-1], count, size)
    wiped = regions.sum(-1) * 100 <= percent * size
    return int(wiped.sum()), wiped.size


def longest_run(marked: np.ndarray) -> int:
    """Return the length of the longest run of True in [n] bool, 0 without any."""
    edges = np.flatnonzero(np.diff(marked, prepend=False, append=False))
    return int(np.max(edges[1::2] - edges[::2], initial=0))


def kept_by_bin(
    kept: np.ndarray, bins: int, num_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count kept tokens by relative position; p is in bin `bins * p // P'`.

    Args:
        kept: [..., P] bool by logical position.
        num_positions: P', at least P; P makes positions relative to the event's.

    Returns:
        Kept tokens [..., bins], and tokens [bins] below P, dropped ones included.
    """
    edges = -(-np.arange(bins + 1) * num_positions // bins)
    edges = np.minimum(edges, kept.shape[-1])
    zeros = np.zeros((*kept.shape[:-1], 1), int)
    below = np.concatenate([zeros, kept.cumsum(-1)], axis=-1)[..., edges]
    return np.diff(below, axis=-1), np.diff(edges)


def superblocks(event: EventRecord) -> int:
    """Return the superblocks that the survivors of an event and what is pinned occupy.

    Where ranks differ, as many as on the rank that needs most.
    """
    tokens = np.count_nonzero(event.survivors >= 0, axis=-1)  # [L, H]
    of_ranks = np.split(tokens, event.ranks, axis=1)
    pages = max(part.sum() for part in of_ranks) // event.block_size
    return event.pinned // event.block_size - (-pages // of_ranks[0].size)


def memory_time(
    frontier: int, global_blocks: int, start: int, end: int, block_size: int
) -> int:
    """Return the memory-time of a request between two events, in superblock-steps.

    Steps compute one token each, as in decoding. The step that computes the token at
    position t holds B + ceil((t + 1 - F) / N) superblocks: 3 for 10 steps are 30.

    Args:
        frontier: F of the event before, tokens; 0 before the first.
        global_blocks: B, see `superblocks`.
        start: position of the first token that counts, F or later.
        end: tokens computed at the next event.
        block_size: N, tokens per superblock.
    """
    local = np.arange(start, end) + 1 - frontier
    return int((global_blocks - (-local // block_size)).sum())
