"""Owns random inputs of the operations of a step: tables, and queries to save."""

import torch

from benchmarks.gpu.draw import Arguments, Draw, Size


def make_page_tables(size: Size, draw: Draw) -> Arguments:
    """A batch of requests with and without an event, and padding."""
    rows, slots, columns = 8 * size.events + 1, 4 * size.events, 2 * size.row_pages
    most = -(-size.budget // size.page)
    num_global = draw.integers(0, most + 1, slots)
    frontier = num_global + draw.integers(0, columns - most - 1, slots)
    num_global[0] = frontier[0] = 0
    slot = draw.integers(0, slots, rows)
    local = draw.integers(1, 2 * size.page, rows)
    arguments = {
        "tables": draw.integers(0, 2**20, rows, columns).int(),
        "lengths": draw.integers(0, 2**20, rows).int(),
        "rows": slot,
        "block_table": draw.integers(0, 2**20, rows, columns + 3).int(),
        "seq_lens": (frontier[slot] * size.page + local).int(),
        "global_blocks": draw.integers(0, 2**20, slots, most).int(),
        "num_global": num_global.int(),
        "frontier_blocks": frontier.int(),
    }
    return draw.here(arguments) | {"block_size": size.page}


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
    made = draw.here({"saved": saved, "targets": targets})
    return made | {"values": wide[:, parts * part : 2 * parts * part]}


def make_head_page_tables(size: Size, draw: Draw) -> Arguments:
    """Some rows of a batch, of requests whose heads have own numbers of pages."""
    batch, slots, columns = 8 * size.events + 1, 4 * size.events, 2 * size.row_pages
    num_heads, most = size.layers * size.heads, -(-size.budget // size.page)
    counts = draw.integers(0, 2 * most + 1, slots, num_heads)
    counts[0] = 0
    first = torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    changed = draw.order(batch)[: batch // 2]
    shape = size.layers, batch, size.heads
    arguments = {
        "tables": draw.integers(0, 2**20, *shape, columns).int(),
        "offsets": draw.integers(0, 2**20, *shape).int(),
        "which": changed,
        "slots": draw.integers(0, slots, len(changed)),
        "blocks": draw.integers(0, 2**20, batch, columns + 3).int(),
        "skip": draw.integers(0, columns, slots).int(),
        "pages": draw.integers(0, 2**30, slots, int(first.max()) + 1).int(),
        "first": first.int(),
        "own_page": draw.integers(0, 2**20, num_heads),
    }
    return draw.here(arguments) | {"stride": size.heads}
