"""Window attention in C++ against its reference, on every layout of the keys.

Slots that hold no key hold NaN. Tolerances: both sides are float32 and add the same
products in different orders, which moves a probability by a few units in its last
place.
"""

from dataclasses import replace
from math import log

import pytest
import torch

from support.scattered_pages import scattered
from vllm_kvpolicy.kernels.cpu import window_usage
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import WindowUsage, window_usage_ref

SCALE = 0.2
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}
RAGGED = torch.tensor([[[300, 17], [1, 256]], [[2, 257], [9, 8]]])
Case = tuple[torch.Tensor, PagedTokens, torch.Tensor]


def make_case(
    lengths: torch.Tensor,
    *,
    group: int = 2,
    window: int = 8,
    size: int = 32,
    page_size: int = 16,
    columns: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Random queries as `QueryWindows` returns them, and keys of these lengths."""
    generator = torch.Generator().manual_seed(1)
    num_events, num_layers, num_heads = lengths.shape
    shape = (num_layers, num_events, window, num_heads * group, size)
    queries = (2 * torch.randn(shape, generator=generator)).to(dtype)
    shape = (*lengths.shape, int(lengths.max()), size)
    tokens = (2 * torch.randn(shape, generator=generator)).to(dtype)
    keys = scattered(tokens, lengths, page_size, columns)
    return queries.permute(1, 0, 3, 2, 4), keys, lengths


def check(
    case: Case, mass: float | None = None, sink_logits: torch.Tensor | None = None
) -> WindowUsage:
    """Compare with the reference; return what the twin found."""
    got = window_usage(*case, SCALE, mass, sink_logits)
    want = window_usage_ref(*case, SCALE, mass, sink_logits)
    for name in ("mean", "last"):
        found = getattr(got, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, getattr(want, name), **TOLERANCE)
    _, keys, lengths = case
    is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
    is_padding = is_padding.repeat_interleave(got.mean.shape[2] // keys.shape[2], 2)
    assert (got.mean[is_padding] == 0).all() and (got.last[is_padding] == 0).all()
    assert torch.equal(got.lengths, lengths) and torch.equal(got.window, want.window)
    if mass is None:
        assert got.nucleus is None
    else:
        assert got.nucleus is not None and torch.equal(got.nucleus, want.nucleus)
    return got


SHAPES = {
    "one-head-each": {"group": 1, "dtype": torch.float32},
    "smollm": {"group": 3, "size": 64, "window": 32, "page_size": 32},
    "odd": {"group": 4, "size": 37, "window": 5, "page_size": 7},
    "half": {"group": 2, "size": 80, "dtype": torch.float16},
    "one-query": {"window": 1},
    "many-queries": {"window": 70, "group": 1},
}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference(shape: dict, columns: bool) -> None:
    check(make_case(RAGGED, columns=columns, **shape))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sinks_take_their_share(shape: dict) -> None:
    queries, keys, lengths = make_case(RAGGED, **shape)
    sink_logits = torch.linspace(0, 20, 2 * queries.shape[2]).view(2, -1)
    with_sinks = check((queries, keys, lengths), sink_logits=sink_logits)
    without = check((queries, keys, lengths))
    assert with_sinks.last.sum() < 0.9 * without.last.sum()
    copies = [pool.clone() for pool in keys.pools]
    apart = check(
        (queries, replace(keys, pools=copies), lengths), sink_logits=sink_logits
    )
    assert torch.equal(apart.mean, with_sinks.mean)


def test_a_sink_above_all_keys_takes_everything() -> None:
    usage = check(make_case(RAGGED), sink_logits=torch.full((2, 4), 1e4))
    assert (usage.mean == 0).all()


def test_nuclei_are_the_references() -> None:
    check(make_case(RAGGED), mass=0.9)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_short_requests_shorten_the_window(length: int) -> None:
    case = make_case(torch.tensor([[[length, 20]]]))
    case[0][:, :, :2, : max(0, 8 - length)] = torch.nan  # before the first token
    usage = check(case)
    assert usage.window.tolist() == [[[min(8, max(length - 1, 1)), 8]]]
    assert usage.last[0, 0, 0, :length].sum() > 0.999


def test_layers_with_a_pool_each() -> None:
    queries, keys, lengths = make_case(RAGGED)
    want = check((queries, keys, lengths))
    copies = [pool.clone() for pool in keys.pools]
    got = check((queries, replace(keys, pools=copies), lengths))
    assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)


def test_lengths_may_be_a_broadcast_view() -> None:
    queries, keys, _ = make_case(torch.full((2, 2, 2), 90))
    check((queries, keys, torch.tensor(90).expand(2, 2, 2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keys_that_are_no_numbers(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[[40, 40, 40, 12]]])
    queries, keys, _ = make_case(lengths, dtype=dtype)
    tokens = keys.dense.clone()
    tokens[0, 0, 0, [0, 7]] = torch.nan  # left out
    tokens[0, 0, 1, 5, 3] = torch.inf  # takes the rows where it is positive
    tokens[0, 0, 1, 9, 3] = -torch.inf
    tokens[0, 0, 2] = torch.nan  # nothing to see
    tokens[0, 0, 3, 11] = torch.nan  # only the newest row sees it
    usage = check((queries, scattered(tokens, lengths, 16), lengths))
    assert not usage.mean.isnan().any() and (usage.mean[0, 0, 4:6] == 0).all()
    assert (usage.mean[0, 0, :2, [0, 7]] == 0).all()
    on_infinity = usage.last[0, 0, 2:4, [5, 9]]
    assert ((on_infinity == 0) | (on_infinity == 1)).all()


def test_half_precision_is_read_exactly() -> None:
    """Every finite float16 as the only number of a key, against a query of one."""
    bits = torch.arange(2**16).to(torch.int16)
    values = bits.view(torch.float16)
    values = values[values.isfinite() & (values.abs() < 60)]
    values = values[: len(values) // 64 * 64].view(-1, 1, 1, 64, 1)
    lengths = torch.full((len(values), 1, 1), 64)
    queries = torch.ones(len(values), 1, 1, 1, 1, dtype=torch.float16)
    keys = PagedTokens.from_dense(values)
    got = window_usage(queries, keys, lengths, 1.0)
    want = window_usage_ref(queries, keys, lengths, 1.0)
    torch.testing.assert_close(got.last, want.last, rtol=2e-6, atol=0)


def test_weights_next_to_nothing_count_as_none() -> None:
    # Logits 0, just above the least weight that counts, just below it, and far below.
    logits = torch.tensor([0.0, -119 * log(2) + 0.01, -119 * log(2) - 0.01, -1e4, 0.0])
    keys = torch.zeros(1, 1, 1, 5, 16)
    keys[..., 0] = logits / SCALE
    queries = torch.zeros(1, 1, 1, 1, 16)
    queries[..., 0] = 1
    lengths = torch.full((1, 1, 1), 5)
    usage = check((queries, PagedTokens.from_dense(keys), lengths))
    assert (usage.last.flatten() > 0).tolist() == [True, True, False, False, True]


def test_a_row_alone_has_the_same_results() -> None:
    queries, keys, lengths = make_case(RAGGED)
    together = window_usage(queries, keys, lengths, SCALE)
    for event, layer, head in ((0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)):
        at = slice(event, event + 1), slice(layer, layer + 1), slice(head, head + 1)
        group, length = slice(head * 2, head * 2 + 2), int(lengths[at])
        pages = keys.pages[at][..., : -(-length // 16)]
        paged = PagedTokens(keys.pools[:1], pages, length)
        mine = queries[at[0], at[1], group].contiguous(), paged, lengths[at]
        alone = window_usage(*mine, SCALE)
        for name in ("mean", "last"):
            whole = getattr(together, name)[at[0], at[1], group, :length]
            assert torch.equal(getattr(alone, name), whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    case = make_case(RAGGED)
    before, want = torch.get_num_threads(), window_usage(*case, SCALE)
    torch.set_num_threads(threads)
    try:
        got = window_usage(*case, SCALE)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)


def test_shapes_that_do_not_fit_are_refused() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[30, 30, 30]]]))
    with pytest.raises(ValueError, match="queries: expected"):
        window_usage(queries[:, :, :4], keys, lengths, SCALE)
    with pytest.raises(RuntimeError, match="pool: expected another dtype"):
        window_usage(queries.float(), keys, lengths, SCALE)
    with pytest.raises(RuntimeError, match="queries: expected the pool's size 32"):
        window_usage(queries[..., :16], keys, lengths, SCALE)
    with pytest.raises(RuntimeError, match="lengths: expected 0 to 30, got 31"):
        window_usage(queries, keys, lengths + 1, SCALE)


def test_a_head_without_tokens_has_no_usage() -> None:
    queries, keys, _ = make_case(torch.tensor([[[30, 30]]]))
    found = window_usage(queries, keys, torch.tensor([[[0, 20]]]), SCALE)
    assert (found.mean[:, :, :2] == 0).all() and (found.last[:, :, :2] == 0).all()
    assert torch.allclose(found.mean[:, :, 2:].sum(-1), torch.ones(1))
