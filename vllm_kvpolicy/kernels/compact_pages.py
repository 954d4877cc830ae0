"""Moves the survivors of an event to their new pages, and what is remembered of them.

Dropped tokens may be merged into them. Axes of what is remembered: A values that a
server remembers, K of them read or written; B superblocks; S requests; n heads through
the layers; W = n * N tokens of a superblock in all heads; R most local tokens right
after an event; T tokens held.

Source: this project; merging by weight is Hard-KV's, appendix G, theorem G.1, for
pairs, with the logarithms of the weights as logits;
https://github.com/SuDIS-ZJU/HARDInfer. Deviations: none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.dispatch import Operation

CHUNK_TOKENS = 2**16
SCRATCH_BYTES = 2**28
MIN_COLUMNS = 32


def compact_pages_ref(
    pages: Tensor,
    source_slots: Tensor,
    dest_slots: Tensor,
    first: Tensor,
    in_place: Tensor | None = None,
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
    scratch = pages[_places(pages, source_slots[changed])]
    _copy_in_place(pages, source_slots[stays], dest_slots[stays])
    pages[_places(pages, dest_slots[changed])] = scratch


compact_pages = Operation(compact_pages_ref)


def list_survivors_ref(
    survives: Tensor, first: Tensor, num_places: int, block_size: int
) -> Tensor:
    """List the survivors of every head, oldest first.

    Args:
        survives: [E, n, T] bool; a head's survivors fill its pages.
        first: [E, n + 1] int64, pages: where each head's start, and the last end.
        num_places: M.
        block_size: N, tokens per page.

    Returns:
        [E, M] int64, head * T + token; -1 where no head has a page.
    """
    num_events, _, num_tokens = survives.shape
    entry = torch.arange(survives[0].numel(), device=survives.device)
    place = (first[:, :-1] * block_size - 1)[..., None] + survives.long().cumsum(-1)
    place = torch.where(survives, place, num_places).flatten(1)
    listed = entry.new_full((num_events, num_places + 1), -1)
    return listed.scatter_(1, place, entry.expand_as(place))[:, :-1]


@dataclass(frozen=True)
class Moves:
    """Where survivors go, in slots: page * N + offset.

    Args:
        source: [E, M] int64, slots that survivors leave; 0, of vLLM's null block, on
            padding.
        dest: [E, M] int64, slots that they go to; likewise.
        first: [E * (n + 1) + 1] int64, where each head's survivors start when events
            are laid end to end. The heads of an event are followed by a row of padding;
            the last entry is where the last event ends.
        in_place: [E, M] bool, see `compact_pages_ref`.
    """

    source: Tensor
    dest: Tensor
    first: Tensor
    in_place: Tensor | None


def survivor_moves_ref(
    sources: Tensor,
    held: Tensor,
    first: Tensor,
    pages: Tensor,
    unmoved: Tensor | None,
    num_tokens: int,
    block_size: int,
) -> Moves:
    """Find the slot that each survivor leaves, and the one that it goes to.

    Example: N = 4, T = 8, two heads. Head 0 holds pages 7 and 3, head 1 holds page 5.
    Head 0 keeps tokens 1, 4, 5 and 7 and gets page 3: its sources are 1, 4, 5, 7. Token
    1 leaves slot 7 * 4 + 1 = 29, token 4 leaves 3 * 4 + 0 = 12; they go to slots 12 and
    13. Head 1 keeps its whole page and gets page 9: its sources 8, 9, 10 and 11 (that
    is 1 * T + token) leave slots 20 to 23 for slots 36 to 39.

    With M = 8 places per event, heads of a first event that start at tokens [0, 2, 5]
    and end at 7, and of a second that start at [0, 1, 3] and end at 8, have the `first`
    [0, 2, 5, 7, 8, 9, 11, 16, 16]: place 7 is a row of padding, that of the second
    event is empty.

    Args:
        sources: [E, M] int64, head * T + token, negative on padding.
        held: [E, n, P] int64, each head's pages before the event.
        first: [E, n + 1] int64, pages: where each head's list starts.
        pages: [E, M / N] int64, the lists after the event.
        unmoved: [E, M / N] bool, the page has the same place in the same list as
            before; None where that is so for all.
        num_tokens: T.
        block_size: N.
    """
    head = sources.div(num_tokens, rounding_mode="floor").clamp_min(0)
    token = sources.clamp_min(0) % num_tokens
    entry = head * held.shape[-1] + token // block_size
    source = held.flatten(1).gather(1, entry) * block_size + token % block_size
    offset = torch.arange(block_size, device=sources.device)
    dest = (pages[..., None] * block_size + offset).flatten(1)
    is_padding = sources < 0
    source, dest = (torch.where(is_padding, 0, slots) for slots in (source, dest))
    in_place = None
    if unmoved is not None:
        in_place = unmoved.repeat_interleave(block_size, dim=-1)
    num_events, num_places = sources.shape
    event = torch.arange(num_events, device=first.device)[:, None]
    starts = (first * block_size + event * num_places).flatten()
    starts = torch.nn.functional.pad(starts, (0, 1), value=num_events * num_places)
    return Moves(source, dest, starts, in_place)


list_survivors = Operation(list_survivors_ref)
survivor_moves = Operation(survivor_moves_ref)


def merge_pages(
    pages: Tensor,
    slots: Tensor,
    others: Tensor,
    weight: Tensor,
    scale: Tensor | float = 1.0,
) -> None:
    """Replace each token x by weight * x + (1 - weight) * other, computed in float32.

    Args:
        pages: [P, N, D] model dtype or 8-bit floating point, any strides, mutated: keys
            or values. A merged token is rounded to nearest; what its numbers cannot
            hold becomes the largest that they can.
        slots: [M] int64, page * N + offset; a slot listed twice has weight 1.
        others: [M, D] model dtype; anything where the weight is 1.
        weight: [M] float32, 0 to 1; at 1 the token stays as it is, bitwise.
        scale: [M] float32 above 0, or one for all, that stored numbers are multiplied
            by.
    """
    places = _places(pages, slots)
    own, share = pages[places], weight[:, None]
    scale = scale[:, None] if isinstance(scale, Tensor) else scale
    mixed = own.float() * scale * share + others.float() * (1 - share)
    most = torch.finfo(own.dtype).max
    stored = (mixed / scale).clamp(-most, most).to(own.dtype)
    pages[places] = torch.where(share < 1, stored, own)


def slice_width(pages: Tensor, num_moves: int) -> int:
    """Return how many columns of tokens a twin that has scratch moves at a time.

    Columns move independently of each other, so slices bound the scratch: it stays
    below `SCRATCH_BYTES` where halves of whole `MIN_COLUMNS` are narrow enough.

    Args:
        pages: [P, N, D].
        num_moves: M, tokens that need room at once.
    """
    width, column_bytes = pages.shape[2], num_moves * pages.element_size()
    while width * column_bytes > SCRATCH_BYTES and width % (2 * MIN_COLUMNS) == 0:
        width //= 2
    return width


def column_slices(
    pages: Tensor, num_moves: int, with_scratch: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Cut tokens into slices of columns that a twin moves one after the other.

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
        width = slice_width(pages, num_moves)
        scratch = pages.new_empty(num_moves, width)
    for columns in slots.split(width, dim=-1):
        yield columns, scratch


def _copy_in_place(pages: Tensor, source_slots: Tensor, dest_slots: Tensor) -> None:
    for start in range(0, len(source_slots), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        tokens = pages[_places(pages, source_slots[chunk])]
        pages[_places(pages, dest_slots[chunk])] = tokens


def _places(pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pages of slots, and the offsets on them."""
    return slots // pages.shape[1], slots % pages.shape[1]


def read_survivors_ref(
    survivors: Tensor,
    local: Tensor,
    which: Tensor,
    index: Tensor,
    first: Tensor,
    global_blocks: Tensor,
    num_tokens: int,
) -> Tensor:
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
