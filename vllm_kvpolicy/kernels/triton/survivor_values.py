"""Twins of kernels.survivor_values: one gather and one scatter for all values."""

import torch
import triton
import triton.language as tl

TILE = 512  # values of a program


def read_survivors(
    survivors: torch.Tensor,
    local: torch.Tensor,
    which: torch.Tensor,
    index: torch.Tensor,
    first: torch.Tensor,
    global_blocks: torch.Tensor,
    num_tokens: int,
) -> torch.Tensor:
    """Read values of the tokens that requests hold, zero where none was written."""
    num_heads, most_local = local.shape[2:]
    shape = (len(which), len(index), num_heads, num_tokens)
    values = survivors.new_empty(shape)
    grid = (shape[1] * num_heads, triton.cdiv(num_tokens, TILE), shape[0])
    _read_survivors[grid](
        survivors,
        local,
        which,
        index,
        first.contiguous(),
        global_blocks,
        values,
        survivors.stride(0),
        local.stride(0),
        global_blocks.stride(0),
        shape[1],
        num_heads,
        survivors.shape[-1],
        most_local,
        num_tokens,
        TILE=TILE,
    )
    return values


def write_survivors(
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
    """Replace the values of requests' survivors, on the superblocks they moved to."""
    num_heads, most_local = local.shape[2:]
    num_places = sources.shape[1]
    list_tiles = triton.cdiv(num_places, TILE)
    local_tiles = triton.cdiv(num_heads * most_local, TILE)
    _write_survivors[(list_tiles + local_tiles, len(index), len(which))](
        survivors,
        local,
        which,
        index,
        values.contiguous(),
        sources.contiguous(),
        num_pages,
        *num_pages.stride(),
        num_local,
        global_blocks,
        survivors.stride(0),
        local.stride(0),
        global_blocks.stride(0),
        len(index),
        num_heads,
        survivors.shape[-1],
        most_local,
        num_places,
        values.shape[-1],
        TILE=TILE,
    )


@triton.jit(do_not_specialize=["num_events", "num_tokens"])
def _read_survivors(
    survivors,  # [A, B, W] float32
    local,  # [A, S, n, R] float32
    which,  # [K] int64
    index,  # [E] int64
    first,  # [E, n + 1] integers
    global_blocks,  # [S + 1, G] int32
    values,  # [K, E, n, T] float32, written
    survivors_stride: tl.int64,
    local_stride: tl.int64,
    blocks_stride: tl.int64,
    num_events,
    num_heads,
    width,
    most_local,
    num_tokens,
    TILE: tl.constexpr,
):
    """Read a tile of one head's tokens."""
    row = tl.program_id(0).to(tl.int64)
    event, head = row // num_heads, row % num_heads
    table = tl.load(which + tl.program_id(2))
    slot = tl.load(index + event)
    block_size = width // num_heads
    bounds = first + event * (num_heads + 1) + head
    start = tl.load(bounds).to(tl.int64) * block_size
    count = tl.load(bounds + 1).to(tl.int64) * block_size - start
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < num_tokens
    is_kept = inside & (token < count)
    entry = start + token
    listed = global_blocks + slot * blocks_stride + entry // width
    block = tl.load(listed, mask=is_kept, other=0).to(tl.int64)
    address = table * survivors_stride + block * width + entry % width
    value = tl.load(survivors + address, mask=is_kept, other=0.0)
    place = token - count
    is_local = inside & (place >= 0) & (place < most_local)
    address = table * local_stride + (slot * num_heads + head) * most_local + place
    value += tl.load(local + address, mask=is_local, other=0.0)
    out = (tl.program_id(2) * num_events + event) * num_heads + head
    tl.store(values + out * num_tokens + token, value, mask=inside)


@triton.jit(
    do_not_specialize=[
        "event_stride",
        "head_stride",
        "num_events",
        "num_places",
        "num_tokens",
    ]
)
def _write_survivors(
    survivors,  # [A, B, W] float32, written
    local,  # [A, S, n, R] float32, written
    which,  # [K] int64
    index,  # [E] int64
    values,  # [K, E, n, T] float32
    sources,  # [E, M] int64
    num_pages,  # [E, n] int64
    event_stride,
    head_stride,
    num_local,  # [E] int64
    global_blocks,  # [S + 1, G] int32
    survivors_stride: tl.int64,
    local_stride: tl.int64,
    blocks_stride: tl.int64,
    num_events,
    num_heads,
    width,
    most_local,
    num_places,
    num_tokens,
    TILE: tl.constexpr,
):
    """Write a tile of one event's survivors, or of its local tokens."""
    tile = tl.program_id(0)  # the one axis of a grid with more than 65,535 programs
    event = tl.program_id(1).to(tl.int64)
    table = tl.load(which + tl.program_id(2))
    slot = tl.load(index + event)
    values += (tl.program_id(2) * num_events + event) * num_heads * num_tokens
    list_tiles = (num_places + TILE - 1) // TILE
    if tile < list_tiles:
        place = tile * TILE + tl.arange(0, TILE)
        inside = place < num_places
        source = tl.load(sources + event * num_places + place, mask=inside, other=-1)
        value = tl.load(values + source, mask=source >= 0, other=0.0)
        listed = global_blocks + slot * blocks_stride + place // width
        block = tl.load(listed, mask=inside, other=0).to(tl.int64)
        address = table * survivors_stride + block * width + place % width
        tl.store(survivors + address, value, mask=inside)
        return
    entry = (tile - list_tiles) * TILE + tl.arange(0, TILE)
    inside = entry < num_heads * most_local
    head, token = (entry // most_local).to(tl.int64), entry % most_local
    pages = num_pages + event * event_stride + head * head_stride
    place = tl.load(pages, mask=inside, other=0) * (width // num_heads) + token
    is_local = inside & (token < tl.load(num_local + event))
    value = tl.load(values + head * num_tokens + place, mask=is_local, other=0.0)
    address = table * local_stride + slot * num_heads * most_local + entry
    tl.store(local + address, value, mask=inside)
