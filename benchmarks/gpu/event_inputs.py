"""Owns random inputs of the stages of an event around the moving of tokens."""

import torch

from benchmarks.gpu.draw import Arguments, Draw, Size

MOST_LOCAL = 47  # local tokens right after an event, per head


def heads_of(size: Size) -> int:
    """Return n, the heads of all layers."""
    return size.layers * size.heads


def blocks_of(size: Size) -> int:
    """Return superblocks that survivors take."""
    return -(-size.budget // size.page)


def page_counts(size: Size, draw: Draw) -> torch.Tensor:
    """Return full pages that each head holds, [E, n]."""
    shape = size.events, heads_of(size)
    return draw.integers(0, size.tokens // size.page + 1, *shape)


def quotas(size: Size, draw: Draw) -> torch.Tensor:
    """Return pages [E, n] that heads get, as many in all as the destinations have."""
    share = draw.uniform(size.events, heads_of(size)) + 0.1
    share = share / share.sum(-1, keepdim=True) * heads_of(size) * blocks_of(size)
    most = size.tokens // size.page
    return share.long().clamp(max=most)


def starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where lists of these lengths [E, n] start when laid end to end."""
    return torch.nn.functional.pad(counts.cumsum(-1), (1, 0))


def make_must_keep_tokens(size: Size, draw: Draw) -> Arguments:
    """Heads of their own lengths."""
    return {
        "num_pages": page_counts(size, draw),
        "num_local": draw.integers(0, MOST_LOCAL, size.events),
        "sinks": draw.integers(0, 9, size.events),
        "block_size": size.page,
        "num_tokens": size.tokens,
    }


def make_limit_must_keep(size: Size, draw: Draw) -> Arguments:
    """Sinks, newest tokens and some between, more and less than the budget."""
    token = torch.arange(size.tokens)
    edge = draw.integers(0, size.budget, size.events * heads_of(size), 2)
    must = (token < edge[:, :1]) | (token >= size.tokens - edge[:, 1:])
    must |= draw.uniform(*must.shape) < 0.01
    return {"must_keep": must, "budget": size.budget}


def make_count_in_pages(size: Size, draw: Draw) -> Arguments:
    """A half of the tokens, of which some lie behind the pages."""
    pages = page_counts(size, draw)
    mask = draw.uniform(*pages.shape, size.tokens) < 0.5
    return {"mask": mask, "num_pages": pages, "block_size": size.page}


def make_page_quota(size: Size, draw: Draw) -> Arguments:
    """Wishes of which some exceed the bounds."""
    shape = size.events, heads_of(size)
    floors = draw.integers(0, 3, *shape)
    return {
        "tokens": draw.integers(0, 2 * size.budget, *shape),
        "floors": floors,
        "caps": floors + draw.integers(0, 2 * blocks_of(size), *shape),
        "total": draw.integers(0, shape[1] * blocks_of(size), size.events),
        "block_size": size.page,
        "most": 2 * size.budget,
    }


def make_assign_pages(size: Size, draw: Draw) -> Arguments:
    """Pages in any head's hands, of which the last are nobody's."""
    blocks = size.events * (blocks_of(size) + 3) + 1
    num_heads, width = heads_of(size), blocks_of(size)
    held = draw.order(blocks * num_heads)[: size.events * num_heads * width]
    dest = draw.order(blocks)[: size.events * blocks_of(size)]
    return {
        "held": held.view(size.events, num_heads, width),
        "num_held": draw.integers(0, width + 1, size.events, num_heads),
        "dest": dest.view(size.events, -1),
        "quota": quotas(size, draw),
        "num_blocks": blocks,
        "num_kv_heads": size.heads,
    }


def make_list_survivors(size: Size, draw: Draw) -> Arguments:
    """As many survivors of each head as fill its pages."""
    quota = quotas(size, draw)
    order = draw.uniform(*quota.shape, size.tokens).argsort(-1).argsort(-1)
    survives = order < (quota * size.page)[..., None]
    places = heads_of(size) * blocks_of(size) * size.page
    made = {"survives": survives, "first": starts(quota)}
    return made | {"num_places": places, "block_size": size.page}


def make_survivor_moves(size: Size, draw: Draw) -> Arguments:
    """Survivors in any order; nobody comes last."""
    quota, shape = quotas(size, draw), (size.events, heads_of(size))
    lists = size.events, shape[1] * blocks_of(size)
    count = (quota.sum(-1) * size.page)[:, None]
    places = lists[1] * size.page
    entry = draw.integers(0, shape[1] * size.tokens, size.events, places)
    return {
        "sources": entry.masked_fill(torch.arange(places) >= count, -1),
        "held": draw.integers(0, 2**20, *shape, size.row_pages),
        "first": starts(quota),
        "pages": draw.integers(0, 2**20, *lists),
        "unmoved": draw.uniform(*lists) < 0.7,
        "num_tokens": size.tokens,
        "block_size": size.page,
    }


def make_enter_requests(size: Size, draw: Draw) -> Arguments:
    """Some rows of a table."""
    slots = 4 * size.events
    return {
        "index": draw.order(slots)[: size.events],
        "dest": draw.integers(0, 2**20, size.events, blocks_of(size)),
        "frontier": draw.integers(2**10, 2**20, size.events),
        "pins": draw.integers(0, 2**10, size.events),
        "global_blocks": draw.integers(0, 9, slots, blocks_of(size) + 3).int(),
        "num_global": draw.integers(0, 9, slots).int(),
        "skip": draw.integers(0, 9, slots).int(),
        "pinned": draw.integers(0, 9, slots).int(),
    }


def make_enter_page_lists(size: Size, draw: Draw) -> Arguments:
    """Lists of some requests, at some of the superblocks."""
    slots, cells = 4 * size.events, heads_of(size) * blocks_of(size)
    blocks = 2 * size.events * blocks_of(size)
    dest = draw.order(blocks)[: size.events * blocks_of(size)]
    return {
        "table_pages": draw.integers(0, 9, blocks, heads_of(size)).int(),
        "table_first": draw.integers(0, 9, slots, heads_of(size) + 1).int(),
        "index": draw.order(slots)[: size.events],
        "dest": dest.view(size.events, -1),
        "first": starts(quotas(size, draw)),
        "pages": draw.integers(0, 2**30, size.events, cells),
    }


def remembered(size: Size, draw: Draw) -> Arguments:
    """Return tables of three values, of which two are asked for."""
    slots, blocks = 4 * size.events, 2 * size.events * blocks_of(size)
    width = heads_of(size) * size.page
    listed = draw.order(blocks)[: size.events * blocks_of(size)]
    index = draw.order(slots)[: size.events]
    table = torch.zeros(slots + 1, blocks_of(size), dtype=torch.int32)
    table[index] = listed.view(size.events, -1).int()
    return {
        "survivors": draw.uniform(3, blocks, width),
        "local": draw.uniform(3, slots, heads_of(size), MOST_LOCAL),
        "which": torch.tensor([2, 0]),
        "index": index,
        "global_blocks": table,
    }


def make_read_survivors(size: Size, draw: Draw) -> Arguments:
    """Survivors of heads of their own lengths."""
    made = remembered(size, draw) | {"first": starts(quotas(size, draw))}
    return made | {"num_tokens": size.tokens}


def make_write_survivors(size: Size, draw: Draw) -> Arguments:
    """Survivors in any order; nobody comes last."""
    places = heads_of(size) * blocks_of(size) * size.page
    entry = draw.integers(0, heads_of(size) * size.tokens, size.events, places)
    shape = 2, size.events, heads_of(size), size.tokens
    room = max(size.tokens - MOST_LOCAL, 0) // size.page
    return remembered(size, draw) | {
        "values": draw.uniform(*shape),
        "sources": entry.masked_fill(torch.arange(places) > places // 2, -1),
        "num_pages": draw.integers(0, room + 1, *shape[1:3]),
        "num_local": draw.integers(0, MOST_LOCAL, size.events),
    }
