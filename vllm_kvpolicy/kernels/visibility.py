"""Tells which queries see which keys where tokens may be dropped after a window.

Query i sees key j <= i while i - j < window, and for ever where j is kept. One integer
per key says so: the first query that no longer sees it.

Source: WG-KV (arXiv 2512.17452) section 3.3. DMS (arXiv 2506.05345) is the same with
`window` one above its own and decisions one token later. The softmax of attention is
in base 2 as in FlashAttention-2 (arXiv 2307.08691).
Deviations: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_kvpolicy.kernels.chunks import CHUNK_BYTES
from vllm_kvpolicy.kernels.dispatch import Operation

NEVER = 2**31 - 1  # no position reaches this


@dataclass(frozen=True)
class Decisions:
    """What the tokens of a step decide, per KV head.

    Args:
        values: [T, H], any strides: bool, keep or drop, or float32 logits.
        scale: factor on a logit.
        most: a logit times `scale` above this, or NaN, drops.
    """

    values: Tensor
    scale: float = 1.0
    most: float = 0.0

    @property
    def keeps(self) -> Tensor:
        """[T, H] bool, keep or drop."""
        if self.values.dtype == torch.bool:
            return self.values
        return self.values * self.scale <= self.most

    @property
    def device(self) -> torch.device:
        return self.values.device


def write_until_ref(
    until: Tensor,
    decisions: Decisions,
    own: Tensor,
    governed: Tensor,
    position: Tensor,
    heads: Tensor,
    base: int,
    window: int,
    shift: int,
    sinks: int,
) -> None:
    """Write until when queries see the tokens that a step computes or decides on.

    The token at t decides on the one at t - shift. A new token counts as kept until it
    is decided on, which may be in the same step, `shift` tokens further on.

    Args:
        until: [S] int32, mutated: the first query position that no longer sees a token,
            `NEVER` where it is kept.
        decisions: of T tokens; those of a request are neighbours, in time order.
        own: [T or more] int64, slot of each token in head 0 of the first layer; 0 for
            nowhere: what the slots of such tokens hold afterwards is unspecified.
        governed: like `own`, of the token that is decided on.
        position: [T or more] int64, of each token in its request.
        heads: [H] int64, contiguous, slots from head 0 to each head.
        base: slots from the first layer to this one.
        window: queries that see a token in any case, its own included.
        shift: 0 or 1.
        sinks: tokens at positions below this are kept whatever is decided.
    """
    keeps = decisions.keeps
    num_tokens = len(keeps)
    if shift:
        until.index_fill_(0, (own[:num_tokens, None] + heads + base).flatten(), NEVER)
    place = position[:num_tokens] - shift
    keeps = keeps | (place < sinks)[:, None]
    last = (place + window).int()[:, None]
    target = governed[:num_tokens, None] + heads + base
    until[target] = torch.where(keeps, NEVER, last)


write_until = Operation(write_until_ref)

QUERIES = 64  # of each row that the reference takes at a time


def until_attention_ref(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    query_start: Tensor,
    ends: Tensor,
    until: Tensor,
    scale: float,
    output: Tensor,
    max_queries: int,
) -> None:
    """Attend from each row's queries to the held tokens that they see.

    A row is one (request, KV head). Of its n queries, number k has the logical
    position ends - n + k and the place lengths - n + k among the tokens held. It sees
    the tokens at its own place and before whose `until` is above its position. A token
    must see itself. Slots that none of a row's queries sees are ignored, even if they
    hold NaN.

    Args:
        query: [Tq, G, D] floating point, any strides, row after row.
        keys, values: [P, N, D], dtype of the queries or 8-bit floating point, any
            strides: keys may be stored as columns (worker.pages).
        tables: [R, C] int32, pages of each row, oldest token first; any valid id
            after the last page. Rows of C are contiguous.
        lengths: [R] int32, tokens held, those of the queries included; at most C * N.
        query_start: [R + 1] int32, first query of each row; rows may have none.
        ends: [R] int32, logical position after the newest token.
        until: [P, N] int32, position of the first query that no longer sees the token
            in a slot.
        scale: factor on dot products.
        output: [Tq, G, D], dtype of the queries, any strides, written. What lies after
            the last row's queries is unspecified.
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


def _held(pools: Sequence[Tensor], tables: Tensor) -> list[Tensor]:
    """Return [T] places, and copies [R, T, ...] of what lies on pages [R, C]."""
    page_size = pools[0].shape[1]
    token = torch.arange(tables.shape[1] * page_size, device=tables.device)
    page = tables.long().repeat_interleave(page_size, 1)
    slot = (token % page_size).expand_as(page)
    return [token, *(pool[page, slot] for pool in pools)]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scale: float
) -> Tensor:
    """Attend with a mask `sees` [R, Q, T], in float32.

    Queries are [R, Q, G, D], keys and values [R, T, D]. Returns [R, Q, G, D] float32;
    NaN for queries that see nothing.
    """
    is_unseen = ~sees.any(1)[..., None]
    keys, values = (part.float().masked_fill(is_unseen, 0.0) for part in (keys, values))
    logits = query.float().flatten(1, 2) @ keys.transpose(1, 2) * scale
    logits = logits.unflatten(1, query.shape[1:3])
    weights = logits.masked_fill(~sees[:, :, None], -torch.inf).softmax(-1)
    return (weights.flatten(1, 2) @ values).unflatten(1, query.shape[1:3])


until_attention = Operation(until_attention_ref)
