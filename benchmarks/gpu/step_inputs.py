"""Owns random inputs of the operations of a step: tables, queries, and decisions."""

import torch

from benchmarks.gpu.draw import Arguments, Draw, Size
from vllm_kvpolicy.kernels.page_bounds import LOWEST
from vllm_kvpolicy.kernels.visibility import Decisions


def make_page_tables(size: Size, draw: Draw) -> Arguments:
    """A batch of requests with and without an event, and padding."""
    rows, slots, columns = 8 * size.events + 1, 4 * size.events, 2 * size.row_pages
    most = -(-size.budget // size.page)
    num_global = draw.integers(0, most + 1, slots)
    skip = num_global + draw.integers(0, columns - most - 1, slots)
    pinned = draw.integers(0, 3, slots)
    num_global[0] = skip[0] = pinned[0] = 0
    slot = draw.integers(0, slots, rows)
    local = draw.integers(1, 2 * size.page, rows)
    return {
        "tables": draw.integers(0, 2**20, rows, columns).int(),
        "lengths": draw.integers(0, 2**20, rows).int(),
        "rows": slot,
        "block_table": draw.integers(0, 2**20, rows, columns + 3).int(),
        "seq_lens": ((skip + pinned)[slot] * size.page + local).int(),
        "global_blocks": draw.integers(0, 2**20, slots, most).int(),
        "num_global": num_global.int(),
        "skip": skip.int(),
        "pinned": pinned.int(),
        "block_size": size.page,
    }


def make_save_rows(size: Size, draw: Draw) -> Arguments:
    """Queries, a part of wider rows; some are kept."""
    part, parts = size.heads * size.dim, size.group
    tokens, rows = 2 * size.tokens, 8 * size.window * parts
    wide = draw.normal(tokens, 3 * parts * part).to(size.dtype)
    wide = wide.to(draw.device)
    targets = torch.zeros(tokens + 7, parts, dtype=torch.int64)
    count = min(8 * size.window, tokens) // 2
    places = 1 + draw.order(rows)[: count * parts]
    targets[draw.order(tokens)[:count]] = places.view(count, parts)
    saved = draw.normal(rows + 1, part).to(size.dtype)
    values = wide[:, parts * part : 2 * parts * part]
    return {"saved": saved, "targets": targets, "values": values}


def make_head_page_tables(size: Size, draw: Draw) -> Arguments:
    """Some rows of a batch, of requests whose heads have own numbers of pages."""
    batch, slots, columns = 8 * size.events + 1, 4 * size.events, 2 * size.row_pages
    num_heads, most = size.layers * size.heads, -(-size.budget // size.page)
    counts = draw.integers(0, 2 * most + 1, slots, num_heads)
    counts[0] = 0
    first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    changed = draw.order(batch)[: batch // 2]
    owned = draw.order(slots * (2 * most + 1)).int().view(slots, -1)
    shape = size.layers, batch, size.heads
    return {
        "tables": draw.integers(0, 2**20, *shape, columns).int(),
        "offsets": draw.integers(0, 2**20, *shape).int(),
        "which": changed,
        "slots": draw.integers(0, slots, len(changed)),
        "blocks": draw.integers(0, 2**20, batch, columns + 3).int(),
        "skip": draw.integers(0, columns, slots).int(),
        "pinned": draw.integers(0, 3, slots).int(),
        "global_blocks": owned,
        "pages": draw.integers(0, 2**30, owned.numel(), num_heads).int(),
        "first": first.int(),
        "own_page": draw.integers(0, 2**20, num_heads),
        "stride": size.heads,
    }


def make_best_pages(size: Size, draw: Draw) -> Arguments:
    """Scores with ties, of a part of the pages of each row."""
    rows, columns = size.rows, size.row_pages
    num_global = draw.integers(0, columns + 1, rows)
    num_global[:2] = torch.tensor([columns, 0])
    num_read = num_global // draw.integers(1, 4, rows)
    scores = draw.normal(rows, columns).mul(8).round() / 8
    behind = torch.arange(columns) >= num_global[:, None]
    return {
        "tables": draw.integers(0, 2**30, rows, columns).int(),
        "scores": scores.masked_fill(behind, LOWEST),
        "num_global": num_global,
        "num_read": num_read,
    }


def make_write_until(size: Size, draw: Draw) -> Arguments:
    """Chunks of prompts and decode steps; every token decides on the one before."""
    counts = [2 * size.page + 3, *[1] * 7, size.page]
    firsts = draw.integers(1, 3 * size.page, len(counts)).tolist()
    per_block, used = size.heads * size.page, 5
    blocks = 1 + draw.order(len(counts) * used + 3)
    pairs = zip(firsts, counts, strict=True)
    spans = [torch.arange(first, first + count) for first, count in pairs]
    position = torch.cat(spans)
    request = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))

    def slots(place: torch.Tensor) -> torch.Tensor:
        block = blocks[request * used + place // size.page % used]
        return block * per_block + place % size.page

    per_layer = (len(blocks) + 1) * per_block
    arguments = {
        "until": draw.integers(0, 2**20, 2 * per_layer).int(),
        "own": slots(position),
        "governed": slots(position - 1),
        "position": position,
        "heads": torch.arange(size.heads) * size.page,
    }
    logits = draw.normal(len(position), size.heads).to(draw.device)
    decisions = {"decisions": Decisions(logits, 10.0, 5.0)}
    numbers = {"base": per_layer, "window": 17, "shift": 1, "sinks": 4}
    return arguments | decisions | numbers
