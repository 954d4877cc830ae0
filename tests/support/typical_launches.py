"""Calls of each twin in Triton with the sizes and dtypes of real servers."""

from collections.abc import Callable
from functools import partial

import torch

from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.kernels.triton import (
    assign_pages,
    compact_pages,
    page_bounds,
    page_tables,
    paged_reductions,
    ranking,
    save_rows,
    segment_quota,
    visibility,
    wgkv_gate,
    window_usage,
)
from vllm_kvpolicy.kernels.visibility import Decisions
from vllm_kvpolicy.kernels.wgkv_gate import GateWeights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CUTS = {"segment_mass": 0.02, "min_segment": 16, "max_segment": 256, "min_quota": 1}


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


mask = partial(empty, dtype=torch.bool)
int32 = partial(empty, dtype=torch.int32)
float32 = partial(empty, dtype=torch.float32)


def _compact_pages() -> None:
    moves = 16 * 32 * 8 * 1024
    first = empty(16 * (32 * 8 + 1) + 1)
    for dtype in (*DTYPES, torch.uint8):
        for head_dim in (32, 80, 128, 256, 33):
            values = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., head_dim:]
            slots = empty(moves)
            compact_pages.compact_pages(values, slots, slots, first)
            compact_pages.compact_pages(values, slots, slots, first, mask(moves))

    for num_tokens, pages in ((600, 38), (2560, 160)):
        first = empty(4, 257)
        sources = compact_pages.list_survivors(
            mask(4, 256, num_tokens), first, 256 * 1024, 16
        )
        held, lists = empty(4, 256, pages), empty(4, 256 * 64)
        for unmoved in (None, mask(4, 256 * 64)):
            for groups in (1, 32):
                sizes = num_tokens, 16, groups
                compact_pages.survivor_moves(
                    sources, held, first, lists, unmoved, *sizes
                )


def _page_bounds() -> None:
    for dtype in DTYPES:
        for head_dim, group, page in ((32, 2, 16), (80, 7, 32), (128, 4, 16)):
            pool = empty(2**17, page, 2 * head_dim, dtype=dtype)[..., :head_dim]
            bounds = empty(2, 2**17, head_dim, dtype=dtype)
            page_bounds.page_bounds(bounds, pool, empty(20_000))
            queries = empty(256 * 8, group, head_dim, dtype=dtype)
            tables = int32(256 * 8, 160)[:, :96]
            page_bounds.page_scores(queries, tables, int32(256 * 8), bounds)
    for columns in (1, 96, 8192):
        tables = int32(256 * 8, columns + 64)[:, :columns]
        scores = float32(256 * 8, columns)
        page_bounds.best_pages(tables, scores, empty(256 * 8), empty(256 * 8))


def _visibility() -> None:
    until, tokens = int32(2**20), empty(8192)
    logits = float32(512, 8)
    for values in (logits, logits[:, :1].expand(512, 8), mask(8, 512).T):
        decisions = Decisions(values, 100.0, 5.0)
        for shift in (0, 1):
            sizes = 2**19, 257, shift, 4
            visibility.write_until(
                until, decisions, tokens, tokens, tokens, empty(8), *sizes
            )


def _page_tables() -> None:
    list_of, table = int32(64), int32(64, 160)
    per_slot = list_of, list_of, list_of
    for block_size in (16, 32):
        rows = table, list_of, empty(64), table, list_of
        page_tables.page_tables(*rows, table, *per_slot, block_size)
    events = empty(4), empty(4, 64), empty(4), empty(4)
    page_tables.enter_requests(*events, table, *per_slot)
    lists = int32(999, 256), int32(65, 257)
    per_head = int32(65), int32(65), int32(65, 99), *lists, empty(256)
    for heads, width in ((8, 160), (1, 4096)):
        tables = int32(32, 64, heads, width + 8)[..., :width]
        rows = tables, int32(32, 64, heads), empty(16), empty(16), int32(64, 512)
        page_tables.head_page_tables(*rows, *per_head, heads)
    given = empty(16), empty(16, 90), empty(16, 257), empty(16, 90 * 256)
    page_tables.enter_page_lists(*lists, *given)


def _assign_pages() -> None:
    for events, heads in ((4, 8), (1, 3)):
        rows = empty(events, 32 * heads, 160), empty(events, 32 * heads)
        for groups in (1, 32):
            sizes = 2000, heads, groups
            assign_pages.assign_pages(*rows, empty(events, 64), rows[1], *sizes)
    for num_heads in (8, 90, 256):
        rows = [empty(4, num_heads)] * 3
        for fills in (True, False):
            assign_pages.page_quota(*rows, empty(4), 16, 2560, fills)
        assign_pages.count_in_pages(mask(4, num_heads, 2560), rows[0], 16)


def _survivor_values() -> None:
    for num_heads in (90, 256):
        tables = float32(2, 2000, num_heads * 16), float32(2, 64, num_heads, 47)
        tables = *tables, empty(1), empty(4)
        blocks, first = int32(65, 64), empty(4, num_heads + 1)
        for starts in (first, first.int()):
            values = compact_pages.read_survivors(*tables, starts, blocks, 2560)
        sources, pages = empty(4, 64 * num_heads * 16), empty(4, num_heads)
        compact_pages.write_survivors(*tables, values, sources, pages, empty(4), blocks)


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
            wgkv_gate.paged_gates(keys, token, token, rope, weights)


def _paged_reductions() -> None:
    lengths = empty(4, 32, 8)
    for dtype in DTYPES:
        for head_dim, group in ((32, 1), (64, 2), (80, 7), (96, 4), (128, 4), (256, 8)):
            pool = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., head_dim:]
            tokens = PagedTokens([pool] * 32, empty(4, 32, 8, 160), 2560)
            heads = float32(4, 32, 8 * group, head_dim)
            paged_reductions.paged_norms(tokens, lengths)
            paged_reductions.paged_cosines(tokens, lengths)
            paged_reductions.paged_projections(tokens, lengths, heads[:, :, :8])
            by_length = heads[..., : head_dim // 2]
            paged_reductions.paged_pair_projections(tokens, lengths, heads, by_length)
            matrices = float32(*heads.shape, head_dim)
            paged_reductions.paged_quadratics(tokens, lengths, heads, matrices)


def _ranking() -> None:
    for num_tokens in (600, 2560, 40_000):
        shape = (4, 32, 8, num_tokens)
        keep, budget = mask(*shape), empty(4, 32, 8)
        for score in (float32(*shape), empty(*shape).double()):
            for target in (budget, 1024):
                ranking.top_k_mask(score, keep, keep, target)
                ranking.fill_next_best(keep, score, keep, target)
            ranking.resize(keep, score, keep, budget, budget, 16)
        ranking.limit_must_keep(keep, 1024)
        ranking.must_keep_tokens(empty(4, 256), empty(4), empty(4), 16, num_tokens)


def _save_rows() -> None:
    for dtype in DTYPES:
        for group, heads in ((1, 32), (4, 8), (7, 4)):
            size = heads * 128
            values = empty(512, group * size, dtype=dtype)
            save_rows.save_rows(
                empty(2**20, size, dtype=dtype), values, empty(512, group)
            )


def _pooled_usage() -> None:
    for num_tokens in (600, 2560, 40_000):
        usage = float32(4, 32, 8, num_tokens)
        for suffix in ("max", "mean", "none"):
            window_usage.pooled_usage(
                usage, empty(4, 32, 8), empty(4, 32, 8), 5, suffix
            )


def _segment_quota() -> None:
    for num_tokens in (600, 2560, 40_000):
        rows, per_row = (1024, num_tokens), empty(1024)
        for by_mass in (True, False):
            given = empty(*rows), per_row, mask(*rows), per_row
            found = segment_quota.segment_quota(*given, **CUTS, by_mass=by_mass)
        scores = float32(*rows)
        for credit in (None, scores):
            segment_quota.credited_mass(scores, per_row, credit, 0.9, 0.5)
        segment_quota.pick_by_quota(scores, found.segment_of, found.quotas)


def _until_attention() -> None:
    for dtype in DTYPES:
        shapes = ((128, 4, 16), (64, 7, 32), (80, 1, 16), (256, 8, 16))
        for head_dim, group, page in shapes[: 4 if dtype == torch.bfloat16 else 1]:
            pool = empty(2**17, page, 2 * head_dim, dtype=dtype)
            query = empty(4096, group, head_dim, dtype=dtype)
            for most in (1, 5, 2048):
                visibility.until_attention(
                    query,
                    *pool.chunk(2, -1),
                    *(int32(64, 160), int32(64), int32(65), int32(64)),
                    int32(2**17, page),
                    0.1,
                    query,
                    most,
                )


def _window_usage() -> None:
    for dtype in DTYPES:
        shapes = (8, 128, 4, 32), (8, 64, 1, 8), (8, 256, 8, 64), (1, 576, 128, 64)
        for heads, head_dim, group, window in shapes:  # the last of latents (MLA)
            pool = empty(2**17, 16, 2 * head_dim, dtype=dtype)[..., :head_dim]
            keys = PagedTokens([pool] * 32, empty(4, 32, heads, 160), 2560)
            queries = empty(4, 32, heads * group, window, head_dim, dtype=dtype)
            sink_logits, held = float32(32, heads * group), empty(4, 32, heads)
            for given in ((None, None), (0.9, None), (None, sink_logits)):
                window_usage.window_usage(queries, keys, held, 0.1, *given)


LAUNCHES: tuple[Callable[[], None], ...] = (
    _compact_pages,
    _page_bounds,
    _visibility,
    _page_tables,
    _assign_pages,
    _survivor_values,
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
