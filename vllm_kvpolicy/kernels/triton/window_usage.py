"""Window attention read from the pages, without storing a logit.

One program reads one tile of keys and takes the group's query heads in turn. Pass 1
writes the largest logit and the sum of weights of every query in every tile, a small
kernel puts the tiles of a row together, and pass 2 makes the same logits again and
reduces the probabilities over the window (two passes as in FlashAttention-2, whose
backward also recomputes them). Nuclei take a third pass, which stores one weight per
(KV head, query, key) of a bounded number of rows, and a search for the smallest weight
inside.

The tile's size follows from the model alone, and a row's tiles are combined in
order, so a row's result depends on nothing but its own queries and keys.
Deviations from the reference, all of them rounding: the order in which dot products and
sums of weights are added up, and the GPU's exp. Sums of weights are float32 within a
tile and float64 across tiles. Nuclei are exact for the weights that were computed: a
count differs from the reference's only where the mass at the edge of its nucleus is
that close to the mass asked for. Usage is pooled by a program per row, which walks it
twice.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.softmax import TINY, effective_window
from vllm_kvpolicy.kernels.window_usage import WindowUsage, check_window

TILE = 1024  # tokens that a program holds at a time


def pooled_usage(
    usage: Tensor,
    lengths: Tensor,
    window: Tensor,
    pool_kernel: int = 5,
    suffix_pad: str = "max",
) -> Tensor:
    """Equal the reference up to rounding."""
    pooled = torch.empty_like(usage, memory_format=torch.contiguous_format)
    rows = (each.contiguous() for each in (usage, lengths, window))
    options = {"POOL": pool_kernel, "PAD": suffix_pad, "TILE": TILE}
    _pooled_usage[(lengths.numel(),)](*rows, pooled, usage.shape[-1], **options)
    return pooled


@triton.jit(do_not_specialize=["num_tokens"])
def _pooled_usage(
    usage, lengths, window, pooled, num_tokens,
    POOL: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pool one row; what its newest keys get is known at the end of the first walk."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_tokens
    length = tl.load(lengths + row)
    num_older = length - tl.load(window + row)
    highest = tl.full((), 0.0, usage.dtype.element_ty)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        mean = _mean(usage + start, token, num_older, POOL)
        is_older = token < num_older
        highest = tl.maximum(highest, tl.max(tl.where(is_older, mean, 0.0)))
        total += tl.sum(tl.where(is_older, mean, 0.0).to(tl.float64))
        padding = is_older | ((token >= length) & (token < num_tokens))
        mean = tl.where(is_older, mean, 0.0)
        tl.store(pooled + start + token, mean, mask=padding & (token < num_tokens))
    value = highest
    if PAD == "mean":
        value = (total / tl.maximum(num_older, 1).to(tl.float64)).to(value.dtype)
    if PAD == "none":
        value = highest * 0.0
    for first in range(0, num_tokens, TILE):
        token = first + tl.arange(0, TILE)
        is_newest = (token >= num_older) & (token < length)
        newest = tl.full((TILE,), 0.0, value.dtype) + value
        tl.store(pooled + start + token, newest, mask=is_newest)


@triton.jit
def _mean(usage, token, num_older, POOL: tl.constexpr):
    """Average the older neighbours; those outside count as zero."""
    total = tl.load(usage + token, mask=token < 0, other=0.0)
    for step in tl.static_range(POOL):
        other = token + (step - POOL // 2)
        is_older = (other >= 0) & (other < num_older)
        total += tl.load(usage + other, mask=is_older, other=0.0)
    return total / POOL


HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
NO_WEIGHT = tl.constexpr(2 * TINY)  # as in `kernels.softmax.softmax`
UNIT = tl.constexpr(2.0**32)  # as in `kernels.nucleus`
BITS_OF_ONE = tl.constexpr(0x3F800000)  # of a float32; those of 2^32 are 2^28 more
WHOLE = tl.constexpr(2.0**23)  # float32 numbers from here on have no fraction
# What differs between batches, alignment too, must not choose the compiled kernel.
SIZES = ["num_tokens", "num_pages", "page_size", "num_tiles", "first_row"]
VARYING = [*SIZES, "pages", "lengths"]


def window_usage(
    queries: Tensor,
    keys: PagedTokens,
    lengths: Tensor,
    scale: float,
    mass: float | None = None,
    sink_logits: Tensor | None = None,
) -> WindowUsage:
    """Queries and pools may have any strides and are not copied.

    Layers that share one view of a pool share the launches.
    """
    check_window(queries, keys, mass, sink_logits)
    window = queries.shape[3]
    parts = []
    for layers, pool in keys.by_pool():
        pages = keys.pages[:, layers].contiguous()
        held = lengths[:, layers].contiguous()
        paged = PagedTokens([pool], pages, keys.num_tokens)
        own = None if sink_logits is None else sink_logits[layers].contiguous()
        parts.append(_usage(queries[:, layers], paged, held, float(scale), mass, own))
    joined = partial(torch.cat, dim=1)
    whole = parts[0] if len(parts) == 1 else map(joined, zip(*parts, strict=True))
    mean, last, *nucleus = whole
    return WindowUsage(mean, last, lengths, effective_window(lengths, window), *nucleus)


def _usage(
    queries: Tensor,
    keys: PagedTokens,
    lengths: Tensor,
    scale: float,
    mass: float | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return mean, last and, if asked for, nuclei of layers with one pool."""
    window = queries.shape[3]
    options = _options(queries, lengths.shape[2])
    pool, pages, num_tokens = keys.pools[0], keys.pages, keys.num_tokens
    inputs = (
        *(queries, *queries.stride(), pool, *pool.stride(), pages, lengths, scale),
        *(num_tokens, pages.shape[-1], pool.shape[1]),
    )
    num_rows, per_row = lengths.numel(), options["GROUP"] * window
    num_tiles = triton.cdiv(num_tokens, options["TILE"])
    empty = partial(queries.new_empty, dtype=torch.float32)
    parts = [empty(num_rows, num_tiles, per_row) for _ in range(2)]
    whole = [empty(num_rows, per_row) for _ in range(2)]
    usage = [empty(*queries.shape[:3], num_tokens) for _ in range(2)]

    grid = (num_rows * num_tiles,)
    _softmax_of_tiles[grid](*inputs, *parts, **options)
    _softmax_of_rows[(num_rows, triton.cdiv(per_row, 128))](
        *(lengths, sink_logits, *parts, *whole, num_tiles, per_row),
        *(window, lengths[0].numel(), options["TILE"], 16, 128),
    )
    _usage_of_tiles[grid](*inputs, *whole, *usage, **options)
    if mass is None:
        return tuple(usage)
    counts = lengths.new_empty((*lengths.shape, window))
    step = min(num_rows, max(1, chunks.CHUNK_BYTES // (4 * window * num_tokens)))
    weights = empty(step, window, num_tokens)
    blocks = num_tiles * triton.cdiv(window, options["STEPS"])
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        _weights_of_tiles[(rows * blocks,)](
            *inputs, whole[0], weights, first, **options
        )
        _nuclei_of_rows[(rows, triton.cdiv(window, 8))](
            *(weights, lengths, counts, num_tokens, first, mass, window, 8, 256)
        )
    return *usage, counts


def _options(queries: Tensor, num_heads: int) -> dict[str, int]:
    """Return what the kernels that read keys are compiled for.

    A tile of keys and the queries beside it fit into the 99 KiB of shared memory that
    smaller cards have: of more than 128 channels a part is read at a time, as of latent
    vectors (MLA), 576. In float32 there are no tensor cores, and more than one small
    block of logits does not fit into registers.
    """
    num_layers, num_q_heads, window, size = queries.shape[1:]
    width = max(16, triton.next_power_of_2(size)) if size <= 128 else 64
    is_half = queries.dtype.itemsize == 2
    tile = (256 if size <= 64 else 128) if is_half else 64
    steps = max(16, triton.next_power_of_2(window))
    return {
        "LAYERS": num_layers,
        "HEADS": num_heads,
        "GROUP": num_q_heads // num_heads,
        "WINDOW": window,
        "SIZE": size,
        "WIDTH": width,
        "TILE": tile,
        "STEPS": min(64 if is_half else 32, steps),
        "num_warps": 4 if tile == 128 else 8,
    }


@triton.jit
def _open(
    queries, q_event, q_layer, q_head, pool, k_page, k_slot, k_size,
    pages, lengths, num_pages, page_size, row, tile,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Read a tile of keys: length of the row, tokens, keys, first query head.

    Keys are [TILE, WIDTH], zero past the row's length and past the head's size; beside
    them is where their tokens [TILE] are, for channels from WIDTH on.
    """
    queries += row // (LAYERS * HEADS) * q_event + row // HEADS % LAYERS * q_layer
    queries += row % HEADS * GROUP * q_head
    length = tl.load(lengths + row).to(tl.int32)
    token = tile * TILE + tl.arange(0, TILE)
    held = token < length
    page = tl.load(pages + row * num_pages + token // page_size, held, other=0)
    slot = (token % page_size).to(tl.int64)
    size = tl.arange(0, WIDTH).to(tl.int64)
    place = pool + page * k_page + slot * k_slot
    mask = held[:, None] & (size < SIZE)[None, :]
    keys = tl.load(place[:, None] + (size * k_size)[None, :], mask, other=0.0)
    return length, token, (keys, place), queries


@triton.jit
def _logits(
    keys, k_size, queries, q_step, q_size, scale, step, token, length,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return [TILE, STEPS] of one query head, as `window_logits` makes them."""
    part, tokens = keys
    size = tl.arange(0, WIDTH).to(tl.int64)
    queries += step.to(tl.int64) * q_step
    asked = step < WINDOW
    mask = (size < SIZE)[:, None] & asked[None, :]
    columns = tl.load(queries[None, :] + (size * q_size)[:, None], mask, other=0.0)
    logits = tl.dot(part, columns, input_precision="ieee")
    for first in range(WIDTH, SIZE, WIDTH):
        size = first + tl.arange(0, WIDTH).to(tl.int64)
        mask = (token < length)[:, None] & (size < SIZE)[None, :]
        part = tl.load(tokens[:, None] + (size * k_size)[None, :], mask, other=0.0)
        mask = (size < SIZE)[:, None] & asked[None, :]
        columns = tl.load(queries[None, :] + (size * q_size)[:, None], mask, other=0.0)
        logits = tl.dot(part, columns, logits, input_precision="ieee")
    logits *= scale
    used = tl.minimum(tl.maximum(length - 1, 1), WINDOW)
    in_window = (step >= WINDOW - used) & (step < WINDOW)
    newest = tl.where(in_window, length - WINDOW + step, -1)
    seen = (token[:, None] <= newest[None, :]) & (logits == logits)
    return tl.where(seen, tl.minimum(logits, HIGHEST), float("-inf"))


@triton.jit(do_not_specialize=VARYING)
def _softmax_of_tiles(
    queries, q_event, q_layer, q_head, q_step, q_size, pool, k_page, k_slot, k_size,
    pages, lengths, scale, num_tokens, num_pages, page_size,
    highest, total,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Pass 1: `highest` and `total` [R, tiles, G * W] of the tiles that hold a key."""
    num_tiles = tl.cdiv(num_tokens, TILE)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    length, token, keys, queries = _open(
        queries, q_event, q_layer, q_head, pool, k_page, k_slot, k_size,
        pages, lengths, num_pages, page_size, row, tile,
        LAYERS, HEADS, GROUP, SIZE, WIDTH, TILE,
    )  # fmt: skip
    if tile * TILE >= length:
        return
    here = (row * num_tiles + tile) * GROUP * WINDOW
    for _ in range(GROUP):
        for first in range(0, WINDOW, STEPS):
            step = first + tl.arange(0, STEPS)
            logits = _logits(
                keys, k_size, queries, q_step, q_size, scale, step, token, length,
                WINDOW, SIZE, WIDTH,
            )  # fmt: skip
            most = tl.maximum(tl.max(logits, 0), LOWEST)
            weight = tl.exp(logits - most[None, :])
            tl.store(highest + here + step, most, step < WINDOW)
            tl.store(total + here + step, tl.sum(weight, 0), step < WINDOW)
        queries += q_head
        here += WINDOW


@triton.jit(do_not_specialize=VARYING)
def _softmax_of_rows(
    lengths, sink_logits, tile_highest, tile_total, highest, total, num_tiles,
    PER_ROW: tl.constexpr, WINDOW: tl.constexpr, PER_EVENT: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put the tiles of pass 1 and sinks together: `highest` and `total` [R, G * W]."""
    row = tl.program_id(0).to(tl.int64)
    query = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.cdiv(tl.load(lengths + row).to(tl.int32), TILE)
    most = tl.full((BLOCK,), LOWEST, tl.float32)
    whole = tl.zeros((BLOCK,), tl.float64)
    if sink_logits is not None:
        head = row % PER_EVENT * (PER_ROW // WINDOW) + query // WINDOW
        sink = tl.load(sink_logits + head, query < PER_ROW, other=LOWEST)
        most = tl.maximum(sink, most)
        whole += tl.exp(sink - most).to(tl.float64)
    for first in range(0, held, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < held)[:, None] & (query < PER_ROW)[None, :]
        here = (row * num_tiles + tile)[:, None] * PER_ROW + query[None, :]
        high = tl.load(tile_highest + here, mask, other=LOWEST)
        part = tl.load(tile_total + here, mask, other=0.0)
        new = tl.maximum(most, tl.max(high, 0))
        part *= tl.exp(high - new[None, :])
        whole = whole * tl.exp(most - new) + tl.sum(part.to(tl.float64), 0)
        most = new
    here = row * PER_ROW + query
    tl.store(highest + here, most, query < PER_ROW)
    whole = tl.maximum(whole, 1.0).to(tl.float32)
    tl.store(total + here, whole, query < PER_ROW)


@triton.jit(do_not_specialize=VARYING)
def _usage_of_tiles(
    queries, q_event, q_layer, q_head, q_step, q_size, pool, k_page, k_slot, k_size,
    pages, lengths, scale, num_tokens, num_pages, page_size,
    highest, total, mean, last,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Pass 2: `mean` and `last` [R, G, T] of what `_softmax_of_rows` left."""
    num_tiles = tl.cdiv(num_tokens, TILE)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    length, token, keys, queries = _open(
        queries, q_event, q_layer, q_head, pool, k_page, k_slot, k_size,
        pages, lengths, num_pages, page_size, row, tile,
        LAYERS, HEADS, GROUP, SIZE, WIDTH, TILE,
    )  # fmt: skip
    here = row * GROUP * WINDOW
    out = row * GROUP * num_tokens + token
    if tile * TILE >= length:
        for _ in range(GROUP):
            tl.store(mean + out, tl.zeros((TILE,), tl.float32), token < num_tokens)
            tl.store(last + out, tl.zeros((TILE,), tl.float32), token < num_tokens)
            out += num_tokens
        return
    used = tl.minimum(tl.maximum(length - 1, 1), WINDOW)
    for _ in range(GROUP):
        of_all = tl.zeros((TILE,), tl.float32)
        of_last = tl.zeros((TILE,), tl.float32)
        for first in range(0, WINDOW, STEPS):
            step = first + tl.arange(0, STEPS)
            logits = _logits(
                keys, k_size, queries, q_step, q_size, scale, step, token, length,
                WINDOW, SIZE, WIDTH,
            )  # fmt: skip
            most = tl.load(highest + here + step, step < WINDOW, other=0.0)
            whole = tl.load(total + here + step, step < WINDOW, other=1.0)
            weight = tl.exp(logits - most[None, :])
            weight = tl.where(weight > NO_WEIGHT, weight, 0.0) * (1.0 / whole)[None, :]
            of_all += tl.sum(weight, 1)
            is_last = (step == WINDOW - 1)[None, :]
            of_last += tl.sum(tl.where(is_last, weight, 0.0), 1)
        tl.store(mean + out, of_all / used, token < num_tokens)
        tl.store(last + out, of_last, token < num_tokens)
        queries += q_head
        here += WINDOW
        out += num_tokens


@triton.jit(do_not_specialize=VARYING)
def _weights_of_tiles(
    queries, q_event, q_layer, q_head, q_step, q_size, pool, k_page, k_slot, k_size,
    pages, lengths, scale, num_tokens, num_pages, page_size,
    highest, weights, first_row,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TILE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Weights [rows, W, T] of KV heads, whole float32 numbers; 0 for what is unseen.

    As `kernels.nucleus` makes them: 2^32 for the largest logit, at least 1.
    """
    blocks = tl.cdiv(WINDOW, STEPS)
    num_tiles = tl.cdiv(num_tokens, TILE)
    index = (tl.program_id(0) // (blocks * num_tiles)).to(tl.int64)
    tile = tl.program_id(0) // blocks % num_tiles
    row = first_row + index
    length, token, keys, queries = _open(
        queries, q_event, q_layer, q_head, pool, k_page, k_slot, k_size,
        pages, lengths, num_pages, page_size, row, tile,
        LAYERS, HEADS, GROUP, SIZE, WIDTH, TILE,
    )  # fmt: skip
    if tile * TILE >= length:
        return
    step = tl.program_id(0) % blocks * STEPS + tl.arange(0, STEPS)
    here = row * GROUP * WINDOW + step
    best = tl.full((TILE, STEPS), float("-inf"), tl.float32)
    most = tl.full((STEPS,), LOWEST, tl.float32)
    for _ in range(GROUP):
        logits = _logits(
            keys, k_size, queries, q_step, q_size, scale, step, token, length,
            WINDOW, SIZE, WIDTH,
        )  # fmt: skip
        best = tl.maximum(best, logits)
        most = tl.maximum(most, tl.load(highest + here, step < WINDOW, other=LOWEST))
        queries += q_head
        here += WINDOW
    weight = tl.exp(best - most[None, :]) * UNIT
    # Rounded to whole numbers, half to even.
    weight = tl.where(weight < WHOLE, (weight + WHOLE) - WHOLE, weight)
    weight = tl.minimum(tl.maximum(weight, 1.0), UNIT)
    weight = tl.where(best == float("-inf"), 0.0, weight)
    out = (index * WINDOW + step)[None, :] * num_tokens + token[:, None]
    mask = (step < WINDOW)[None, :] & (token < length)[:, None]
    tl.store(weights + out, weight, mask)


@triton.jit
def _held(bits, weights, length, is_step, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Return sum and number [STEPS] int64 of weights whose bits are `bits` or more."""
    total = tl.zeros((STEPS, BLOCK), tl.int64)
    number = tl.zeros((STEPS, BLOCK), tl.int64)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        mask = is_step[:, None] & (token < length)[None, :]
        weight = tl.load(weights[:, None] + token[None, :], mask, other=0.0)
        is_held = weight.to(tl.int32, bitcast=True) >= bits[:, None]
        total += tl.where(is_held, weight, 0.0).to(tl.int64)
        number += is_held.to(tl.int64)
    return tl.sum(total, 1), tl.sum(number, 1)


@triton.jit(do_not_specialize=VARYING)
def _nuclei_of_rows(
    weights, lengths, counts, num_tokens, first_row,
    MASS: tl.constexpr, WINDOW: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the largest of `weights` that hold `MASS` of their row's sum: [R, W] int64.

    Searches for the smallest weight inside, bit by bit: numbers above zero are in the
    order of their bits. Of equal weights as many are inside as it takes.
    """
    index = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * STEPS + tl.arange(0, STEPS)
    is_step = step < WINDOW
    length = tl.load(lengths + first_row + index).to(tl.int32)
    rows = weights + (index * WINDOW + step) * num_tokens
    edge = tl.full((STEPS,), BITS_OF_ONE, tl.int32)
    total, _ = _held(edge, rows, length, is_step, STEPS, BLOCK)
    needed = tl.maximum(tl.ceil(total.to(tl.float64) * MASS).to(tl.int64), 1)
    for bit in range(29):
        higher = edge + (1 << (28 - bit))
        held, _ = _held(higher, rows, length, is_step, STEPS, BLOCK)
        edge = tl.where(held >= needed, higher, edge)
    above, count = _held(edge + 1, rows, length, is_step, STEPS, BLOCK)
    weight = edge.to(tl.float32, bitcast=True).to(tl.int64)
    count += (needed - above + weight - 1) // weight
    out = (first_row + index) * WINDOW + step
    tl.store(counts + out, tl.where(total > 0, count, 0), is_step)
