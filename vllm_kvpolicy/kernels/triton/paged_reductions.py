"""Twins in Triton of kernels.paged_reductions: one program per tile of a row's tokens.

Keys and values are read where they lie and nothing of their size is stored: norms and
projections read them once, cosines twice, squares once per 16 rows of the matrix. The
tile's size follows from the head size alone, and the tiles of a row are combined in
order, so a row's result depends on nothing but its own tokens. Layers that share one
view of the pool also share one kernel launch.
Deviations from the reference, all of them rounding: the order in which products are
added up; unit keys are summed up without having been rounded to float32, and cosines
are divided by the key's length at the end; a pair's length is the root of a float32 sum
of squares, which overflows for numbers above 1e19 and vanishes for those below 1e-19.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.paged_reductions import (
    check_pairs,
    check_shape,
    check_squares,
)

LEAST = tl.constexpr(1e-12)  # as in `torch.nn.functional.normalize`
NUMBERS = 8192  # of a tile, 64 per thread
MEAN_TILES = 16  # tiles added up at once
MATRIX_ROWS = 16  # of a matrix, multiplied at once
# What differs between batches, alignment too, must not choose the compiled kernel.
ROWS = ["launch_rows", "event_rows", "first_row"]
VARYING = [*ROWS, "num_tokens", "num_pages", "page_size", "pages", "lengths"]


def paged_norms(tokens: PagedTokens, lengths: Tensor) -> Tensor:
    return _values(tokens, lengths, None)


def paged_cosines(keys: PagedTokens, lengths: Tensor) -> Tensor:
    size, num_rows = keys.shape[-1], lengths.numel()
    tile = _tile(size)
    num_tiles = triton.cdiv(keys.num_tokens, tile)
    sums = lengths.new_empty(num_rows, num_tiles, size, dtype=torch.float64)
    means = lengths.new_empty(*keys.shape[:3], size, dtype=torch.float32)
    _over_tiles(_sums_of_tiles, keys, lengths, sums)
    _means_of_rows[(num_rows,)](
        *(lengths.contiguous(), sums, means, num_tiles),
        SIZE=size,
        WIDTH=_width(size),
        TILE=tile,
        TILES=MEAN_TILES,
    )
    return _values(keys, lengths, means, is_cosine=True)


def paged_projections(keys: PagedTokens, lengths: Tensor, directions: Tensor) -> Tensor:
    check_shape("directions", directions, (*keys.shape[:3], keys.shape[-1]))
    return _values(keys, lengths, directions)


def paged_pair_projections(
    keys: PagedTokens, lengths: Tensor, directions: Tensor, by_length: Tensor
) -> Tensor:
    group = check_pairs(keys, directions, by_length)
    shape = (*directions.shape[:3], keys.num_tokens)
    scores = lengths.new_empty(shape, dtype=torch.float32)
    inputs = directions.contiguous(), by_length.contiguous(), scores
    _over_tiles(_pair_projections_of_tiles, keys, lengths, *inputs, GROUP=group)
    return scores


def paged_quadratics(
    keys: PagedTokens, lengths: Tensor, directions: Tensor, matrices: Tensor
) -> Tensor:
    check_squares(keys, directions, matrices)
    return _values(keys, lengths, directions, matrices.contiguous())


def _values(
    tokens: PagedTokens,
    lengths: Tensor,
    directions: Tensor | None,
    matrices: Tensor | None = None,
    is_cosine: bool = False,
) -> Tensor:
    """Return what `_values_of_tiles` writes, [E, L, H * G, T]."""
    rows = tokens.shape[:3]
    if directions is not None:
        rows, directions = directions.shape[:3], directions.contiguous()
    values = lengths.new_empty(*rows, tokens.num_tokens, dtype=torch.float32)
    _over_tiles(
        *(_values_of_tiles, tokens, lengths, directions, matrices, values),
        GROUP=rows[2] // tokens.shape[2],
        ROWS=MATRIX_ROWS,
        IS_COSINE=is_cosine,
    )
    return values


def _width(size: int) -> int:
    """Return the power of two that holds a head of this size."""
    return max(16, triton.next_power_of_2(size))


def _tile(size: int) -> int:
    return min(128, NUMBERS // _width(size))


def _over_tiles(
    kernel: Any,
    tokens: PagedTokens,
    lengths: Tensor,
    *others: Tensor | None,
    **options: Any,
) -> None:
    """Launch a kernel over all tiles of all rows, once for each view of a pool.

    Args:
        kernel: takes the arguments that are built here, then `others`.
        lengths: [E, L, H] int64, tokens held.
        others: its further inputs and outputs, one row after the other.
        options: its further constants.
    """
    num_events, num_layers, num_heads, num_tokens, size = tokens.shape
    pages, lengths = tokens.pages.contiguous(), lengths.contiguous()
    tile = _tile(size)
    for layers, pool in tokens.by_pool():
        launch_rows = (layers.stop - layers.start) * num_heads
        grid = (num_events * launch_rows * triton.cdiv(num_tokens, tile),)
        kernel[grid](
            *(pool, *pool.stride(), pages, lengths),
            *(launch_rows, num_layers * num_heads, layers.start * num_heads),
            *(num_tokens, pages.shape[-1], pool.shape[1]),
            *others,
            SIZE=size,
            WIDTH=_width(size),
            TILE=tile,
            **options,
        )


@triton.jit
def _place(launch_rows, event_rows, first_row, num_tokens, TILE: tl.constexpr):
    """Return row [E * L * H], tile and tokens of a program."""
    num_tiles = tl.cdiv(num_tokens, TILE)
    index = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = index // launch_rows * event_rows + first_row + index % launch_rows
    tile = tl.program_id(0) % num_tiles
    return row, tile, tile * TILE + tl.arange(0, TILE)


@triton.jit
def _read(
    pool, page_stride, slot_stride, number_stride, pages, lengths,
    num_pages, page_size, row, token,
    first, END: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return numbers first .. END - 1 of tokens, [TILE, WIDTH] float32.

    Zero past the row's length and from END on.
    """
    is_held = token < tl.load(lengths + row)
    page = tl.load(pages + row * num_pages + token // page_size, is_held, other=0)
    slot = (token % page_size).to(tl.int64)
    number = (first + tl.arange(0, WIDTH)).to(tl.int64)
    start = page * page_stride + slot * slot_stride
    place = start[:, None] + (number * number_stride)[None, :]
    mask = is_held[:, None] & (number < END)[None, :]
    return tl.load(pool + place, mask, other=0.0).to(tl.float32)


@triton.jit
def _lengths(numbers):
    """Return how long rows [TILE, WIDTH] are, at least LEAST."""
    return tl.maximum(tl.sqrt_rn(tl.sum(numbers * numbers, 1)), LEAST)


@triton.jit(do_not_specialize=VARYING)
def _sums_of_tiles(
    pool, page_stride, slot_stride, number_stride, pages, lengths,
    launch_rows, event_rows, first_row, num_tokens, num_pages, page_size,
    sums,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write `sums` [R, tiles, D] float64 of unit keys, for tiles that hold a key."""
    row, tile, token = _place(launch_rows, event_rows, first_row, num_tokens, TILE)
    if tile * TILE >= tl.load(lengths + row):
        return
    numbers = _read(
        pool, page_stride, slot_stride, number_stride, pages, lengths,
        num_pages, page_size, row, token, 0, SIZE, WIDTH,
    )  # fmt: skip
    inverse = 1.0 / _lengths(numbers).to(tl.float64)
    total = tl.sum(numbers.to(tl.float64) * inverse[:, None], 0)
    number = tl.arange(0, WIDTH)
    start = (row * tl.cdiv(num_tokens, TILE) + tile) * SIZE
    tl.store(sums + start + number, total, number < SIZE)


@triton.jit(do_not_specialize=["lengths", "num_tiles"])
def _means_of_rows(
    lengths, sums, means, num_tiles,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Add the tiles of each row up: unit vectors `means` [R, D]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, WIDTH)
    held = tl.cdiv(tl.load(lengths + row).to(tl.int32), TILE)
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, held, TILES):
        tile = first + tl.arange(0, TILES)
        place = (row * num_tiles + tile)[:, None] * SIZE + number[None, :]
        mask = (tile < held)[:, None] & (number < SIZE)[None, :]
        total += tl.sum(tl.load(sums + place, mask, other=0.0), 0)
    length = tl.maximum(tl.sqrt(tl.sum(total * total, 0)), LEAST)
    mean = (total / length).to(tl.float32)
    tl.store(means + row * SIZE + number, mean, number < SIZE)


@triton.jit(do_not_specialize=VARYING)
def _pair_projections_of_tiles(
    pool, page_stride, slot_stride, number_stride, pages, lengths,
    launch_rows, event_rows, first_row, num_tokens, num_pages, page_size,
    directions, by_length, scores,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write `scores` [R, G, T] of `directions` [R, G, D], `by_length` [R, G, D/2]."""
    HALF: tl.constexpr = SIZE // 2
    row, _, token = _place(launch_rows, event_rows, first_row, num_tokens, TILE)
    real = _read(
        pool, page_stride, slot_stride, number_stride, pages, lengths,
        num_pages, page_size, row, token, 0, HALF, WIDTH // 2,
    )  # fmt: skip
    imag = _read(
        pool, page_stride, slot_stride, number_stride, pages, lengths,
        num_pages, page_size, row, token, HALF, SIZE, WIDTH // 2,
    )  # fmt: skip
    length = tl.sqrt_rn(real * real + imag * imag)
    number = tl.arange(0, WIDTH // 2)
    is_held = token < tl.load(lengths + row)
    for head in range(GROUP):
        query = row * GROUP + head
        along = directions + query * SIZE + number
        x = tl.load(along, number < HALF, other=0.0)
        y = tl.load(along + HALF, number < HALF, other=0.0)
        weight = tl.load(by_length + query * HALF + number, number < HALF, other=0.0)
        terms = real * x[None, :] + imag * y[None, :] + length * weight[None, :]
        score = tl.where(is_held, tl.sum(terms, 1), 0.0)
        tl.store(scores + query * num_tokens + token, score, token < num_tokens)


@triton.jit(do_not_specialize=VARYING)
def _values_of_tiles(
    pool, page_stride, slot_stride, number_stride, pages, lengths,
    launch_rows, event_rows, first_row, num_tokens, num_pages, page_size,
    directions, matrices, values,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, IS_COSINE: tl.constexpr,
):  # fmt: skip
    """Write `values` [R, G, T]: projections on `directions` [R, G, D], or lengths.

    Those of unit keys if IS_COSINE. The squares of `matrices` [R, G, D, D] are added,
    ROWS rows at a time, so that a matrix need not fit into registers.
    """
    row, _, token = _place(launch_rows, event_rows, first_row, num_tokens, TILE)
    numbers = _read(
        pool, page_stride, slot_stride, number_stride, pages, lengths,
        num_pages, page_size, row, token, 0, SIZE, WIDTH,
    )  # fmt: skip
    number = tl.arange(0, WIDTH)
    for head in range(GROUP):
        query = row * GROUP + head
        if directions is None:
            value = tl.sqrt_rn(tl.sum(numbers * numbers, 1))
        else:
            along = directions + query * SIZE + number
            along = tl.load(along, number < SIZE, other=0.0)
            value = tl.sum(numbers * along[None, :], 1)
        if IS_COSINE:
            value = value / _lengths(numbers)
        if matrices is not None:
            for first in range(0, SIZE, ROWS):
                some = first + tl.arange(0, ROWS)
                place = (query * SIZE + some)[:, None] * SIZE + number[None, :]
                mask = (some < SIZE)[:, None] & (number < SIZE)[None, :]
                part = tl.load(matrices + place, mask, other=0.0)
                turned = tl.dot(numbers, tl.trans(part), input_precision="ieee")
                own = _read(
                    pool, page_stride, slot_stride, number_stride, pages, lengths,
                    num_pages, page_size, row, token, first, SIZE, ROWS,
                )  # fmt: skip
                value += tl.sum(turned * own, 1)
        # Zero on padding even where the direction is not a number.
        value = tl.where(token < tl.load(lengths + row), value, 0.0)
        tl.store(values + query * num_tokens + token, value, token < num_tokens)
