"""Attention over pages where each token carries the position until which it is visible.

Memory order: D may have any stride in keys and values, so that keys may be stored as
columns (worker.pages); query and output are read and written by their strides. All
else is read in place; nothing is copied.
Source: the mask is that of kernels.visibility.visible_until, read per slot, WG-KV
(arXiv 2512.17452) section 3.3; softmax in base 2 as in FlashAttention-2
(arXiv 2307.08691). Deviations: none.
"""

from collections.abc import Sequence

import torch

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.dispatch import Operation

QUERIES = 64  # of each row that the reference takes at a time


def until_attention_ref(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    ends: torch.Tensor,
    until: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    max_queries: int,
) -> None:
    """Attend from each row's queries to the held tokens that they see.

    A row is one (request, KV head). Of its n queries, number k has the logical
    position ends - n + k and the place lengths - n + k among the tokens held. It sees
    the tokens at its own place and before whose `until` is above its position. A token
    must see itself. Slots that none of a row's queries sees are ignored, even if they
    hold NaN.

    Args:
        query: [Tq, G, D] floating point, row after row.
        keys, values: [P, N, D], dtype of the queries or 8-bit floating point, any
            strides.
        tables: [R, C] int32, pages of each row, oldest token first; any valid id
            after the last page. Rows of C are contiguous.
        lengths: [R] int32, tokens held, those of the queries included; at most C * N.
        query_start: [R + 1] int32, first query of each row; rows may have none.
        ends: [R] int32, logical position after the newest token.
        until: [P, N] int32, position of the first query that no longer sees the token
            in a slot; see `visibility.visible_until`.
        scale: factor on dot products.
        output: [Tq, G, D], dtype of the queries, written. What lies after the last
            row's queries is unspecified.
        max_queries: no row has more; 1 where the batch decodes.
    """
    width = tables.shape[1] * keys.shape[1]
    nobody, group, size = query.shape
    found = output.new_zeros(nobody + 1, group, size)
    queries = min(QUERIES, max_queries)
    row_bytes = 4 * width * (3 * size + 3 * queries * group)
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(tables), step):
        rows = slice(start, start + step)
        token, known, key, value = _held((until, keys, values), tables[rows])
        is_held = token < lengths[rows, None]
        known = known.masked_fill(~is_held, torch.iinfo(until.dtype).min)
        count = query_start[start : start + step + 1].diff()[:, None]
        for first in range(0, max_queries, queries):
            number = first + torch.arange(queries, device=query.device)
            place = query_start[:-1][rows, None] + number
            place = torch.where(number < count, place, nobody)
            behind = number - count  # of the newest token's end
            sees = token <= (lengths[rows, None] + behind)[..., None]
            sees &= (ends[rows, None] + behind)[..., None] < known[:, None]
            taken = query[place.clamp_max(nobody - 1)]
            attended = _attend(taken, key, value, sees, scale)
            found[place.flatten().long()] = attended.flatten(0, 1).to(found.dtype)
    output.copy_(found[:-1])


def _held(pools: Sequence[torch.Tensor], tables: torch.Tensor) -> list[torch.Tensor]:
    """Return [T] places, and copies [R, T, ...] of what lies on pages [R, C]."""
    page_size = pools[0].shape[1]
    token = torch.arange(tables.shape[1] * page_size, device=tables.device)
    page = tables.long().repeat_interleave(page_size, 1)
    slot = (token % page_size).expand_as(page)
    return [token, *(pool[page, slot] for pool in pools)]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sees: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with a mask, in float32.

    Args:
        query: [R, Q, G, D] floating point.
        keys: [R, T, D] floating point.
        values: [R, T, D] floating point.
        sees: [R, Q, T] bool.
        scale: factor on dot products.

    Returns:
        [R, Q, G, D] float32; NaN for queries that see nothing.
    """
    is_unseen = ~sees.any(1)[..., None]
    keys, values = (part.float().masked_fill(is_unseen, 0.0) for part in (keys, values))
    logits = query.float().flatten(1, 2) @ keys.transpose(1, 2) * scale
    logits = logits.unflatten(1, query.shape[1:3])
    weights = logits.masked_fill(~sees[:, :, None], -torch.inf).softmax(-1)
    return (weights.flatten(1, 2) @ values).unflatten(1, query.shape[1:3])


until_attention = Operation(until_attention_ref)
