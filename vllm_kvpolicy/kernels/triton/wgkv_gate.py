"""Write gates of keys that are read in place: a program per tile of a row's tokens.

A program turns the keys of its tile back, normalises both halves of both, and goes
through the hidden units block by block; nothing of the size of keys or units is stored.
Angles are reduced to one turn in float64. Tiles follow from the model alone, so a
token's gate depends on nothing but its own key and position. Layers that share one view
of the pool also share one kernel launch.
Deviations from the reference, all of them rounding: the order of sums; sines and
cosines in float32; and in half precision, hidden units and logits stay in float32,
where the reference rounds them to the dtype of the weights.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.wgkv_gate import EPSILON, GateWeights, check_shapes

TILE_BYTES = 16384  # of half a key in a tile, times the bytes of a number
ADDED = tl.constexpr(EPSILON)
HALF_TURN = tl.constexpr(math.pi)
ROOT = tl.constexpr(math.sqrt(0.5))
# What differs between batches, alignment too, must not choose the compiled kernel.
ROWS = ["launch_rows", "event_rows", "first_row", "num_heads"]
SIZES = ["num_tokens", "num_pages", "page_size"]
VARYING = [*ROWS, *SIZES, "pages", "tokens", "positions"]


def paged_gates(
    keys: PagedTokens,
    token: Tensor,
    positions: Tensor,
    rope: Rope,
    weights: GateWeights,
) -> Tensor:
    check_shapes(keys, token, positions, weights)
    num_events, num_layers, num_heads, _, size = keys.shape
    num_tokens = token.shape[-1]
    gates = torch.empty(token.shape, dtype=torch.float32, device=token.device)
    pages, token, positions = (
        part.contiguous() for part in (keys.pages, token, positions)
    )
    turns = rope.inv_freq / (2 * math.pi)
    tensors = [part.contiguous() for part in weights.tensors().values()]
    half = max(16, triton.next_power_of_2(size // 2))
    number_bytes = weights.first.element_size()
    tile = max(16, min(64, TILE_BYTES // (half * number_bytes**2)))
    for layers, pool in keys.by_pool() if gates.numel() else ():
        launch_rows = (layers.stop - layers.start) * num_heads
        grid = (num_events * launch_rows * triton.cdiv(num_tokens, tile),)
        _gates_of_tiles[grid](
            *(pool, *pool.stride(), pages, token, positions, turns, rope.scaling),
            *(*tensors, gates),
            *(launch_rows, num_layers * num_heads, layers.start * num_heads, num_heads),
            *(num_tokens, pages.shape[-1], pool.shape[1]),
            SIZE=size,
            HALF=half,
            UNITS=weights.first.shape[2],
            TILE=tile,
            num_stages=2,
        )
    return gates


@triton.jit
def _part(first, unit, number, QUARTER: tl.constexpr, SIZE: tl.constexpr, is_read):
    """Return weights of units on one half of one kind of key, [units, HALF]."""
    place = unit[:, None] * (2 * SIZE) + QUARTER * (SIZE // 2) + number[None, :]
    return tl.load(first + place, is_read, other=0.0)


@triton.jit
def _cos_and_sin(turn):
    """Return cosine and sine of parts of a turn, [-1/2, 1/2] float32, to 3e-7.

    Taylor series of half the angle; the library's functions bring a way for angles of
    any size, many times as much code.
    """
    half = turn * HALF_TURN
    square = half * half
    sin = 1.0 - square * (1.0 / 156)
    sin = 1.0 - square * (1.0 / 110) * sin
    sin = 1.0 - square * (1.0 / 72) * sin
    sin = 1.0 - square * (1.0 / 42) * sin
    sin = 1.0 - square * (1.0 / 20) * sin
    sin = half * (1.0 - square * (1.0 / 6) * sin)
    cos = 1.0 - square * (1.0 / 132)
    cos = 1.0 - square * (1.0 / 90) * cos
    cos = 1.0 - square * (1.0 / 56) * cos
    cos = 1.0 - square * (1.0 / 30) * cos
    cos = 1.0 - square * (1.0 / 12) * cos
    cos = 1.0 - square * (1.0 / 2) * cos
    return 1.0 - 2.0 * sin * sin, 2.0 * sin * cos


@triton.jit
def _scaled(low, high, norm, number, SIZE: tl.constexpr):
    """Normalise keys in two halves [TILE, HALF] float32; return them in `norm`'s dtype.

    Numbers past the end of a half are zero and stay so.
    """
    is_number = number < SIZE // 2
    mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE
    scale = tl.rsqrt(mean + ADDED)[:, None]
    low_weight = tl.load(norm + number, is_number, other=0.0)
    high_weight = tl.load(norm + SIZE // 2 + number, is_number, other=0.0)
    dtype = norm.dtype.element_ty
    low = (low * scale).to(dtype) * low_weight[None, :]
    high = (high * scale).to(dtype) * high_weight[None, :]
    return low.to(dtype), high.to(dtype)


@triton.jit(do_not_specialize=VARYING)
def _gates_of_tiles(
    pool, page_stride, slot_stride, number_stride, pages, tokens, positions,
    turns, scaling,
    pre_norm, post_norm, first, first_bias, second, second_bias, gates,
    launch_rows, event_rows, first_row, num_heads, num_tokens, num_pages, page_size,
    SIZE: tl.constexpr, HALF: tl.constexpr, UNITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write `gates` [R, F] of one tile of tokens of a row."""
    num_tiles = tl.cdiv(num_tokens, TILE)
    index = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = index // launch_rows * event_rows + first_row + index % launch_rows
    spot = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    is_token = spot < num_tokens
    token = tl.load(tokens + row * num_tokens + spot, is_token, other=0)
    page = tl.load(pages + row * num_pages + token // page_size, is_token, other=0)
    start = (page * page_stride + token % page_size * slot_stride)[:, None]
    number = tl.arange(0, HALF)
    is_number = number < SIZE // 2
    is_read = is_token[:, None] & is_number[None, :]
    place = pool + start + (number.to(tl.int64) * number_stride)[None, :]
    low = tl.load(place, is_read, other=0.0).to(tl.float32)
    offset = (SIZE // 2) * number_stride
    high = tl.load(place + offset, is_read, other=0.0).to(tl.float32)
    position = tl.load(positions + row * num_tokens + spot, is_token, other=0)
    turn = tl.load(turns + number, is_number, other=0.0)[None, :]
    turn = position.to(tl.float64)[:, None] * turn
    cos, sin = _cos_and_sin((turn - tl.floor(turn + 0.5)).to(tl.float32))
    low_before = (low * cos + high * sin) / scaling
    high_before = (high * cos - low * sin) / scaling
    head = row % event_rows
    norm = head // num_heads * SIZE
    before_0, before_1 = _scaled(low_before, high_before, pre_norm + norm, number, SIZE)
    after_0, after_1 = _scaled(low, high, post_norm + norm, number, SIZE)
    logit = tl.zeros((TILE,), tl.float32)
    for begin in range(0, UNITS, TILE):
        unit = begin + tl.arange(0, TILE)
        is_unit = unit < UNITS
        is_weight = is_unit[:, None] & is_number[None, :]
        weights = first + head * UNITS * 2 * SIZE
        part = _part(weights, unit, number, 0, SIZE, is_weight)
        units = tl.dot(before_0, tl.trans(part), input_precision="ieee")
        part = _part(weights, unit, number, 1, SIZE, is_weight)
        units = tl.dot(before_1, tl.trans(part), units, input_precision="ieee")
        part = _part(weights, unit, number, 2, SIZE, is_weight)
        units = tl.dot(after_0, tl.trans(part), units, input_precision="ieee")
        part = _part(weights, unit, number, 3, SIZE, is_weight)
        units = tl.dot(after_1, tl.trans(part), units, input_precision="ieee")
        own = head * UNITS + unit
        units += tl.load(first_bias + own, is_unit, other=0.0).to(tl.float32)[None, :]
        units = 0.5 * units * (1.0 + tl.erf(units * ROOT))
        weight = tl.load(second + own, is_unit, other=0.0).to(tl.float32)
        logit += tl.sum(units * weight[None, :], 1)
    logit += tl.load(second_bias + head).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-logit))
    tl.store(gates + row * num_tokens + spot, gate, is_token)
