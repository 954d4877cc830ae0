"""Owns random inputs of the operations of admission: masked attention, and gates."""

import torch

from benchmarks.gpu.draw import Arguments, Draw, Size
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.visibility import NEVER
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights

THETA, EXPANSION = 5e5, 4  # Llama's rotation, and its gates' units per channel


def make_until_attention(size: Size, draw: Draw, queries: int = 1) -> Arguments:
    """Rows of one layer; every other one in ten has no query."""
    rows, width = size.events * size.heads, size.row_pages
    count = max(rows * width + 1, size.pool_pages)
    pages = draw.order(count - 1)[: rows * width] + 1
    content = draw.normal(len(pages), size.page, 2 * size.dim).to(size.dtype)
    pool = torch.zeros(count, size.page, 2 * size.dim, dtype=size.dtype)
    pool[pages] = content
    lengths = draw.integers(max(queries, size.tokens // 2), size.tokens + 1, rows)
    lengths[0] = size.tokens
    counts = draw.integers(1, queries + 1, rows)
    counts[0] = queries
    counts[9::10] = 0
    ends = lengths + draw.integers(0, 1000, rows)
    bits = draw.uniform(rows, width * size.page) < 0.25
    position = torch.arange(width * size.page)
    ends_of_rows = torch.where(bits, NEVER, position + 2 * size.window)
    until = torch.zeros(count, size.page, dtype=torch.int32)
    # Places count from the row's own beginning, positions from further on.
    shifted = ends_of_rows + (ends - lengths)[:, None]
    until[pages] = shifted.clamp_max(2**31 - 1).int().view(-1, size.page)
    query = draw.normal(int(counts.sum()), size.group, size.dim).to(size.dtype)
    keys, values = pool.to(draw.device).chunk(2, -1)
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "tables": pages.view(rows, width).int(),
        "lengths": lengths.int(),
        "query_start": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "ends": ends.int(),
        "until": until,
        "output": torch.zeros_like(query),
        "scale": size.dim**-0.5,
        "max_queries": queries,
    }


def gates_of(size: Size, draw: Draw) -> GateWeights:
    """Gates of all layers whose answers spread between 0 and 1."""
    channels, units = size.dim, EXPANSION * size.dim
    layers, heads = size.layers, size.heads
    parts = {
        "pre_norm": 1 + 0.1 * draw.normal(layers, channels),
        "post_norm": 1 + 0.1 * draw.normal(layers, channels),
        "first": draw.normal(layers, heads, units, 2 * channels) * channels**-0.5,
        "first_bias": 0.1 * draw.normal(layers, heads, units),
        "second": draw.normal(layers, heads, units) * units**-0.5,
        "second_bias": draw.normal(layers, heads),
    }
    made = draw.here({name: part.to(size.dtype) for name, part in parts.items()})
    return GateWeights(**made)


def gates_of_newest(size: Size, draw: Draw, paged: Arguments) -> Arguments:
    """Return gates of the newest tokens of each row of `kernel_inputs.paged_keys`."""
    lengths = paged["lengths"][..., None]
    newest = torch.arange(2 * size.window, device=lengths.device) - 2 * size.window
    token = (lengths + newest).clamp_min(0)
    rope = Rope.from_theta(THETA, size.dim)
    return {
        "keys": paged["keys"],
        "token": token,
        "positions": token + 100_000,
        "rope": Rope(rope.inv_freq.to(lengths.device)),
        "weights": gates_of(size, draw),
    }
