"""Reads and writes what is remembered of each survivor, for several values at once.

Axes: A values that a server remembers, K of them read or written; B superblocks; S
requests; n heads through the layers; W = n * N tokens of a superblock in all heads; R
most local tokens right after an event; T tokens held.

Source: this project. Deviations: none.
"""

import torch

from vllm_kvpolicy.kernels.dispatch import Operation


def read_survivors_ref(
    survivors: torch.Tensor,
    local: torch.Tensor,
    which: torch.Tensor,
    index: torch.Tensor,
    first: torch.Tensor,
    global_blocks: torch.Tensor,
    num_tokens: int,
) -> torch.Tensor:
    """Read values of the tokens that requests hold, zero where none was written.

    Args:
        survivors: [A, B, W] float32, those of a request's superblocks end to end.
        local: [A, S, n, R] float32.
        which: [K] int64, rows of A.
        index: [E] int64, rows of S and of `global_blocks`.
        first: [E, n + 1] integers, pages: where each head's survivors start, and end.
        global_blocks: [S + 1, G] int32, superblocks of each request's survivors.
        num_tokens: T.

    Returns:
        [K, E, n, T] float32.
    """
    width, (num_heads, most_local) = survivors.shape[-1], local.shape[2:]
    token = torch.arange(num_tokens, device=index.device)
    starts = first.long() * (width // num_heads)
    blocks = global_blocks[index].long()
    last = blocks.shape[-1] * width - 1
    entry = (starts[:, :-1, None] + token).clamp_max(last).flatten(1)
    block = blocks.gather(1, entry.div(width, rounding_mode="floor"))
    address = block * width + entry % width
    kept = survivors.flatten(1)[which[:, None, None], address]
    place = token - starts.diff(dim=-1)[..., None]
    newest = local[which[:, None], index]
    nearest = place.clamp(0, most_local - 1).expand(*newest.shape[:-1], -1)
    newest = torch.where(place < most_local, newest.gather(-1, nearest), 0.0)
    return torch.where(place < 0, kept.view_as(newest), newest)


def write_survivors_ref(
    survivors: torch.Tensor,
    local: torch.Tensor,
    which: torch.Tensor,
    index: torch.Tensor,
    values: torch.Tensor,
    sources: torch.Tensor,
    num_pages: torch.Tensor,
    num_local: torch.Tensor,
    global_blocks: torch.Tensor,
) -> None:
    """Replace the values of requests' survivors, on the superblocks they moved to.

    Args:
        survivors, local: mutated; these, `which` and `index` as for reading.
        values: [K, E, n, T] float32, before survivors are gathered.
        sources: [E, M] int64, head * T + token of each survivor in the order of the
            new page lists; negative after the last. M is a multiple of W.
        num_pages: [E, n] int64, full pages below the frontier before the event.
        num_local: [E] int64, tokens at and above it.
        global_blocks: [S + 1, G] int32, after the event.
    """
    width, (num_heads, most_local) = survivors.shape[-1], local.shape[2:]
    wanted = sources.clamp_min(0).expand(len(which), -1, -1)
    kept = torch.where(sources < 0, 0.0, values.flatten(2).gather(2, wanted))
    blocks = global_blocks[index, : sources.shape[1] // width].long()
    survivors[which[:, None, None], blocks] = kept.unflatten(2, (-1, width))
    token = torch.arange(most_local, device=index.device)
    place = num_pages[..., None] * (width // num_heads) + token
    place = place.clamp_max(values.shape[-1] - 1).expand(len(which), -1, -1, -1)
    is_local = token < num_local[:, None, None]
    local[which[:, None], index] = torch.where(is_local, values.gather(-1, place), 0.0)


read_survivors = Operation(read_survivors_ref)
write_survivors = Operation(write_survivors_ref)
