"""Tests of window attention, which twins in C++ and in Triton pass, on any pages.

Files of tests import all of them and say which twin runs. Slots that hold no key hold
NaN. Tolerances: both sides are float32 and add the same products in different orders,
which moves a probability by a few units in its last place.
"""

from dataclasses import replace
from math import log

import pytest
import torch

from support.scattered_pages import pools_apart, scattered
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    window_usage,
    window_usage_ref,
)

HALF, FULL = torch.float16, torch.float32
SCALE = 0.2
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}
NEAR = 1e-5  # share of a row's mass that rounding may move
# Two tiles of Triton's in half precision, five in float32.
RAGGED = torch.tensor([[[300, 17], [1, 256]], [[2, 257], [9, 8]]])
ONE_LAYER, SMALL = RAGGED[:, :1], torch.tensor([[[40, 17], [1, 33]]])
Case = tuple[torch.Tensor, PagedTokens, torch.Tensor]


def make_case(
    lengths: torch.Tensor,
    *,
    group: int = 2,
    window: int = 8,
    size: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = HALF,
    num_tokens: int | None = None,
) -> Case:
    """Random queries as `QueryWindows` returns them, and keys of these lengths."""
    generator = torch.Generator().manual_seed(1)
    num_events, num_layers, num_heads = lengths.shape
    shape = (num_layers, num_events, window, num_heads * group, size)
    # Of wide heads more products are added, so that larger logits are rounded more.
    spread = 2 if size <= 128 else 64 / size
    queries = (spread * torch.randn(shape, generator=generator)).to(dtype)
    shape = (*lengths.shape, num_tokens or int(lengths.max()), size)
    tokens = (2 * torch.randn(shape, generator=generator)).to(dtype)
    keys = scattered(tokens, lengths, page_size)
    return queries.permute(1, 0, 3, 2, 4), keys, lengths


def rows_of_logits(logits: torch.Tensor) -> Case:
    """Return one query per row [R, T] of logits, each its own request."""
    num_rows, num_tokens = logits.shape
    keys = torch.zeros(num_rows, 1, 1, num_tokens, 16)
    keys[:, 0, 0, :, 0] = logits / SCALE
    queries = torch.zeros(num_rows, 1, 1, 1, 16)
    queries[..., 0] = 1
    lengths = torch.full((num_rows, 1, 1), num_tokens)
    return queries, PagedTokens.from_dense(keys), lengths


def run(
    case: Case, mass: float | None = None, sink_logits: torch.Tensor | None = None
) -> WindowUsage:
    """Run the twin through its operation."""
    before = window_usage.calls["reference"]
    usage = window_usage(*case, SCALE, mass, sink_logits)
    assert window_usage.calls["reference"] == before, "the twin has not run"
    return usage


def check_twin(
    case: Case, mass: float | None = None, sink_logits: torch.Tensor | None = None
) -> WindowUsage:
    """Compare with the reference; return what the twin found."""
    got = run(case, mass, sink_logits)
    want = window_usage_ref(*case, SCALE, mass, sink_logits)
    for name in ("mean", "last"):
        found = getattr(got, name)
        assert found.dtype == FULL and found.shape == getattr(want, name).shape
        torch.testing.assert_close(found, getattr(want, name), **TOLERANCE)
    _, keys, lengths = case
    is_padding = torch.arange(keys.num_tokens) >= lengths[..., None]
    is_padding = is_padding.repeat_interleave(got.mean.shape[2] // keys.shape[2], 2)
    assert (got.mean[is_padding] == 0).all() and (got.last[is_padding] == 0).all()
    assert torch.equal(got.lengths, lengths) and torch.equal(got.window, want.window)
    if mass is None:
        assert got.nucleus is None
    else:
        check_counts(case, mass, got.nucleus)
    return got


def check_counts(case: Case, mass: float, got: torch.Tensor | None) -> None:
    """Equal counts, but where the reference's own mass at the edge is all but `mass`.

    There the reference itself counts otherwise for a mass that rounding could make.
    """
    near = mass - NEAR, min(mass + NEAR, 1.0)
    least, most = (window_usage_ref(*case, SCALE, p).nucleus for p in near)
    assert got is not None and least is not None and most is not None
    assert got.dtype == torch.int64 and got.shape == least.shape
    assert (least <= got).all() and (got <= most).all()


@pytest.mark.parametrize(
    "shape",
    [
        # Read in parts of 64 channels: latent vectors (MLA), and one part not whole.
        {"size": 576, "dtype": HALF, "group": 3, "window": 32},
        {"size": 136, "dtype": FULL, "group": 3, "window": 20},
        {"group": 1, "dtype": FULL},
        {"group": 2, "size": 80, "page_size": 32},
        pytest.param({"group": 4, "size": 128, "window": 5}, marks=pytest.mark.slow),
        pytest.param({"window": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_reference(shape: dict) -> None:
    check_twin(make_case(ONE_LAYER, **shape), mass=0.9)


@pytest.mark.parametrize(
    "window, dtype", [(33, FULL), pytest.param(70, HALF, marks=pytest.mark.slow)]
)
def test_more_queries_than_a_block_holds(window: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([[[40, 34]]])
    check_twin(make_case(lengths, window=window, dtype=dtype, size=80), mass=0.9)


def test_short_requests_shorten_the_window() -> None:
    lengths = [1, 2, 7, 8, 9, 20]
    case = make_case(torch.tensor(lengths).view(6, 1, 1))
    for event, length in enumerate(lengths):
        case[0][event, :, :, : max(0, 8 - length)] = torch.nan  # before its first token
    usage = check_twin(case, mass=0.7)
    assert usage.window.flatten().tolist() == [1, 1, 6, 7, 8, 8]
    assert (usage.last.sum(-1) > 0.999).all()


def test_layers_with_a_pool_each() -> None:
    queries, keys, lengths = make_case(SMALL)
    want = run((queries, keys, lengths), mass=0.6)
    got = check_twin((queries, pools_apart(keys), lengths), mass=0.6)
    for name in ("mean", "last", "nucleus"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_other_layouts_change_nothing() -> None:
    queries, keys, lengths = make_case(SMALL)
    want, dense = run((queries, keys, lengths)), keys.dense
    copies = {
        "columns": scattered(dense, lengths, 32, columns=True),
        "plain": PagedTokens.from_dense(dense),
        "table with more columns": PagedTokens(
            keys.pools, torch.nn.functional.pad(keys.pages, (0, 3)), keys.num_tokens
        ),
    }
    assert copies["columns"].pools[0].stride()[1:] == (1, 32)
    for copy in copies.values():
        got = run((queries.contiguous(), copy, lengths))
        assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_keys_that_are_no_numbers(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[[40, 40, 40, 12]]])
    queries, keys, _ = make_case(lengths, dtype=dtype)
    tokens = keys.dense.clone()
    tokens[0, 0, 0, [0, 7]] = torch.nan  # left out
    tokens[0, 0, 1, 5, 3] = torch.inf  # takes the rows where it is positive
    tokens[0, 0, 1, 9, 3] = -torch.inf
    tokens[0, 0, 2] = torch.nan  # nothing to see
    tokens[0, 0, 3, 11] = torch.nan  # only the newest row sees it
    case = queries, scattered(tokens, lengths, 16), lengths
    usage = check_twin(case, mass=0.9)
    assert not usage.mean.isnan().any() and usage.nucleus is not None
    assert (usage.mean[0, 0, 4:6] == 0).all() and (usage.nucleus[0, 0, 2] == 0).all()
    assert (usage.mean[0, 0, :2, [0, 7]] == 0).all()
    on_infinity = usage.last[0, 0, 2:4, [5, 9]]
    assert ((on_infinity == 0) | (on_infinity == 1)).all()


def test_queries_that_are_no_numbers_spoil_their_own_row_only() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[30, 30]]]))
    want = run((queries, keys, lengths), mass=0.9)
    queries = queries.clone()
    queries[0, 0, 1, 3] = torch.nan
    got = check_twin((queries, keys, lengths), mass=0.9)
    assert torch.equal(got.mean[:, :, [0, 2, 3]], want.mean[:, :, [0, 2, 3]])
    assert torch.equal(got.last, want.last)


def test_weights_next_to_nothing_count_as_none() -> None:
    # Logits 0, just above the least weight that counts, just below it, and far below.
    logits = torch.tensor([0.0, -119 * log(2) + 0.01, -119 * log(2) - 0.01, -1e4, 0.0])
    usage = check_twin(rows_of_logits(logits[None]))
    assert (usage.last.flatten() > 0).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize(("group", "apart"), [(1, False), (3, True)])
def test_sinks_take_their_share(group: int, apart: bool) -> None:
    queries, keys, lengths = make_case(SMALL, group=group, window=5)
    sink_logits = torch.linspace(0, 20, 4 * group).view(2, -1)
    if apart:
        keys = replace(keys, pools=[pool.clone() for pool in keys.pools])
    with_sinks = check_twin((queries, keys, lengths), sink_logits=sink_logits)
    without = run((queries, keys, lengths))
    assert with_sinks.last.sum() < 0.9 * without.last.sum()


@pytest.mark.slow
def test_a_sink_above_all_keys_takes_everything() -> None:
    usage = check_twin(make_case(RAGGED), sink_logits=torch.full((2, 4), 1e4))
    assert (usage.mean == 0).all()


def test_a_row_alone_has_the_same_results() -> None:
    queries, keys, lengths = make_case(RAGGED[:1], num_tokens=310)
    together = run((queries, keys, lengths), 0.8)
    for event, layer, head in ((0, 0, 0), (0, 1, 1)):
        at = slice(event, event + 1), slice(layer, layer + 1), slice(head, head + 1)
        group = slice(head * 2, head * 2 + 2)
        length = int(lengths[at])
        pages = keys.pages[at][..., : -(-length // 16)]
        paged = PagedTokens(keys.pools[:1], pages, length)
        alone = run(
            (queries[at[0], at[1], group].contiguous(), paged, lengths[at]), 0.8
        )
        for name in ("mean", "last"):
            whole = getattr(together, name)[at[0], at[1], group, :length]
            assert torch.equal(getattr(alone, name), whole)
        assert together.nucleus is not None and alone.nucleus is not None
        assert torch.equal(alone.nucleus, together.nucleus[at])


def test_refuses_shapes_that_do_not_fit() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[9, 9]]]), group=2)
    for wrong in (queries[:, :, :3], queries[:0], queries[:, :, :, :0]):
        with pytest.raises(ValueError, match="queries: expected"):
            window_usage(wrong, keys, lengths, SCALE)
