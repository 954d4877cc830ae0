"""Calls of each twin in Triton with the sizes and dtypes of real servers."""

from collections.abc import Callable

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.triton.assign_pages import (
    assign_pages,
    count_in_pages,
    page_quota,
)
from vllm_kvpolicy.kernels.triton.compact_pages import (
    compact_pages,
    list_survivors,
    read_survivors,
    survivor_moves,
    write_survivors,
)
from vllm_kvpolicy.kernels.triton.page_bounds import (
    best_pages,
    page_bounds,
    page_scores,
)
from vllm_kvpolicy.kernels.triton.page_tables import (
    enter_page_lists,
    enter_requests,
    head_page_tables,
    page_tables,
)
from vllm_kvpolicy.kernels.triton.paged_reductions import (
    paged_cosines,
    paged_norms,
    paged_pair_projections,
    paged_projections,
    paged_quadratics,
)
from vllm_kvpolicy.kernels.triton.ranking import (
    fill_next_best,
    limit_must_keep,
    must_keep_tokens,
    resize,
    top_k_mask,
)
from vllm_kvpolicy.kernels.triton.save_rows import save_rows
from vllm_kvpolicy.kernels.triton.segment_quota import (
    credited_mass,
    pick_by_quota,
    segment_quota,
)
from vllm_kvpolicy.kernels.triton.visibility import until_attention, write_until
from vllm_kvpolicy.kernels.triton.wgkv_gate import paged_gates
from vllm_kvpolicy.kernels.triton.window_usage import pooled_usage, window_usage
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mask(*shape: int) -> torch.Tensor:
    """Return a mask without memory."""
    return empty(*shape, dtype=torch.bool)


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _compact_pages() -> None:
    moves = 16 * 32 * 8 * 1024
    first = empty(16 * (32 * 8 + 1) + 1)
    for dtype in (*DTYPES, torch.uint8):
        for head_dim in (32, 80, 128, 256, 33):
            values = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., head_dim:]
            slots = empty(moves)
            compact_pages(values, slots, slots, first)
            compact_pages(values, slots, slots, first, mask(moves))

    for num_tokens, pages in ((600, 38), (2560, 160)):
        first = empty(4, 257)
        sources = list_survivors(mask(4, 256, num_tokens), first, 256 * 1024, 16)
        held, lists = empty(4, 256, pages), empty(4, 256 * 64)
        for unmoved in (None, mask(4, 256 * 64)):
            for groups in (1, 32):
                sizes = num_tokens, 16, groups
                survivor_moves(sources, held, first, lists, unmoved, *sizes)


def _page_bounds() -> None:
    for dtype in DTYPES:
        for head_dim, group, page in ((32, 2, 16), (80, 7, 32), (128, 4, 16)):
            pool = empty(2**17, page, 2 * head_dim, dtype=dtype)[..., :head_dim]
            bounds = empty(2, 2**17, head_dim, dtype=dtype)
            page_bounds(bounds, pool, empty(20_000))
            queries = empty(256 * 8, group, head_dim, dtype=dtype)
            tables = empty(256 * 8, 160, dtype=torch.int32)[:, :96]
            page_scores(queries, tables, empty(256 * 8, dtype=torch.int32), bounds)
    for columns in (1, 96, 8192):
        tables = empty(256 * 8, columns + 64, dtype=torch.int32)[:, :columns]
        scores = empty(256 * 8, columns, dtype=torch.float32)
        best_pages(tables, scores, empty(256 * 8), empty(256 * 8))


def _visibility() -> None:
    until, tokens = empty(2**20, dtype=torch.int32), empty(8192)
    logits = empty(512, 8, dtype=torch.float32)
    for values in (logits, logits[:, :1].expand(512, 8), mask(8, 512).T):
        decisions = Decisions(values, 100.0, 5.0)
        for shift in (0, 1):
            sizes = 2**19, 257, shift, 4
            write_until(until, decisions, tokens, tokens, tokens, empty(8), *sizes)


def _page_tables() -> None:
    list_of, table = empty(64, dtype=torch.int32), empty(64, 160, dtype=torch.int32)
    per_slot = list_of, list_of
    for block_size in (16, 32):
        rows = table, list_of, empty(64), table, list_of
        page_tables(*rows, table, *per_slot, block_size)
    enter_requests(empty(4), empty(4, 64), empty(4), table, *per_slot)


def _assign_pages() -> None:
    for events, heads in ((4, 8), (1, 3)):
        rows = empty(events, 32 * heads, 160), empty(events, 32 * heads)
        for groups in (1, 32):
            sizes = 2000, heads, groups
            assign_pages(*rows, empty(events, 64), rows[1], *sizes)


def _page_quota() -> None:
    for num_heads in (8, 90, 256):
        rows = [empty(4, num_heads)] * 3
        for fills in (True, False):
            page_quota(*rows, empty(4), 16, 2560, fills)
        count_in_pages(mask(4, num_heads, 2560), rows[0], 16)


def _survivor_values() -> None:
    for num_heads in (90, 256):
        tables = empty(2, 2000, num_heads * 16).float(), empty(2, 64, num_heads, 47)
        tables = tables[0], tables[1].float(), empty(1), empty(4)
        blocks, first = empty(65, 64).int(), empty(4, num_heads + 1)
        for starts in (first, first.int()):
            values = read_survivors(*tables, starts, blocks, 2560)
        sources, pages = empty(4, 64 * num_heads * 16), empty(4, num_heads)
        write_survivors(*tables, values, sources, pages, empty(4), blocks)


def _head_page_tables() -> None:
    def list_of(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    per_slot = list_of(65), list_of(65, 99), list_of(65, 257), empty(256)
    for heads, width in ((8, 160), (1, 4096)):
        tables = list_of(32, 64, heads, width + 8)[..., :width]
        rows = tables, list_of(32, 64, heads), empty(16), empty(16), list_of(64, 512)
        head_page_tables(*rows, *per_slot, heads)
    lists = empty(16), empty(16, 257), empty(16, 90)
    enter_page_lists(list_of(65, 99), list_of(65, 257), *lists)


def _paged_gates() -> None:
    rope = Rope(empty(64, dtype=torch.float64))
    for dtype in DTYPES:
        shapes = ((128, 512), (128, 192), (80, 320), (256, 384))
        for head_dim, units in shapes[: 4 if dtype == torch.bfloat16 else 1]:
            pool = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., :head_dim]
            keys = PagedTokens([pool] * 32, empty(4, 32, 8, 160), 2560)
            norm, per_head = empty(32, head_dim, dtype=dtype), empty(32, 8, dtype=dtype)
            first = empty(32, 8, units, 2 * head_dim, dtype=dtype)
            weights = GateWeights(
                *(norm, norm, first, first[..., 0], first[..., 0], per_head)
            )
            token = empty(4, 32, 8, 256)
            paged_gates(keys, token, token, rope, weights)


def _paged_reductions() -> None:
    lengths = empty(4, 32, 8)
    for dtype in DTYPES:
        for head_dim, group in ((32, 1), (64, 2), (80, 7), (96, 4), (128, 4), (256, 8)):
            pool = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., head_dim:]
            tokens = PagedTokens([pool] * 32, empty(4, 32, 8, 160), 2560)
            heads = empty(4, 32, 8 * group, head_dim, dtype=torch.float32)
            paged_norms(tokens, lengths)
            paged_cosines(tokens, lengths)
            paged_projections(tokens, lengths, heads[:, :, :8])
            by_length = heads[..., : head_dim // 2]
            paged_pair_projections(tokens, lengths, heads, by_length)
            matrices = empty(*heads.shape, head_dim, dtype=torch.float32)
            paged_quadratics(tokens, lengths, heads, matrices)


def _ranking() -> None:
    for num_tokens in (600, 2560, 40_000):
        shape = (4, 32, 8, num_tokens)
        keep, budget = mask(*shape), empty(4, 32, 8)
        for score in (empty(*shape, dtype=torch.float32), empty(*shape).double()):
            for target in (budget, 1024):
                top_k_mask(score, keep, keep, target)
                fill_next_best(keep, score, keep, target)
            resize(keep, score, keep, budget, budget, 16)
        limit_must_keep(keep, 1024)
        must_keep_tokens(empty(4, 256), empty(4), empty(4), 16, num_tokens)


def _save_rows() -> None:
    for dtype in DTYPES:
        for group, heads in ((1, 32), (4, 8), (7, 4)):
            size = heads * 128
            values = empty(512, group * size, dtype=dtype)
            save_rows(empty(2**20, size, dtype=dtype), values, empty(512, group))


def _pooled_usage() -> None:
    for num_tokens in (600, 2560, 40_000):
        usage = empty(4, 32, 8, num_tokens, dtype=torch.float32)
        for suffix in ("max", "mean", "none"):
            pooled_usage(usage, empty(4, 32, 8), empty(4, 32, 8), 5, suffix)


def _segment_quota() -> None:
    for num_tokens in (600, 2560, 40_000):
        rows, per_row = (1024, num_tokens), empty(1024)
        for by_mass in (True, False):
            found = segment_quota(
                empty(*rows),
                per_row,
                mask(*rows),
                per_row,
                segment_mass=0.02,
                min_segment=16,
                max_segment=256,
                min_quota=1,
                by_mass=by_mass,
            )
        scores = empty(*rows, dtype=torch.float32)
        for credit in (None, scores):
            credited_mass(scores, per_row, credit, 0.9, 0.5)
        pick_by_quota(scores, found.segment_of, found.quotas)


def _until_attention() -> None:
    def per_row(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    for dtype in DTYPES:
        shapes = ((128, 4, 16), (64, 7, 32), (80, 1, 16), (256, 8, 16))
        for head_dim, group, page in shapes[: 4 if dtype == torch.bfloat16 else 1]:
            pool = empty(2**17, page, 2 * head_dim, dtype=dtype)
            query = empty(4096, group, head_dim, dtype=dtype)
            for most in (1, 5, 2048):
                until_attention(
                    query,
                    *pool.chunk(2, -1),
                    *(per_row(64, 160), per_row(64), per_row(65), per_row(64)),
                    per_row(2**17, page),
                    0.1,
                    query,
                    most,
                )


def _window_usage() -> None:
    for dtype in DTYPES:
        for head_dim, group, window in ((128, 4, 32), (64, 1, 8), (256, 8, 64)):
            pool = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., :head_dim]
            keys = PagedTokens([pool] * 32, empty(4, 32, 8, 160), 2560)
            queries = empty(4, 32, 8 * group, window, head_dim, dtype=dtype)
            sink_logits = empty(32, 8 * group, dtype=torch.float32)
            for given in ((None, None), (0.9, None), (None, sink_logits)):
                window_usage(queries, keys, empty(4, 32, 8), 0.1, *given)


LAUNCHES: tuple[Callable[[], None], ...] = (
    _compact_pages,
    _page_bounds,
    _visibility,
    _page_tables,
    _assign_pages,
    _page_quota,
    _survivor_values,
    _head_page_tables,
    _paged_gates,
    _paged_reductions,
    _ranking,
    _save_rows,
    _pooled_usage,
    _segment_quota,
    _until_attention,
    _window_usage,
)
"""Calls of all twins of one file each."""
