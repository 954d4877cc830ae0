"""Window attention in Triton against its reference, on every layout of the keys.

Slots that hold no key hold NaN. Tolerances: both sides are float32 and add the same
products in different orders, which moves a probability by a few units in its last
place.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log

import pytest
import torch

from support.scattered_pages import Make, scattered
from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.softmax import window_logits
from vllm_kvpolicy.kernels.triton import window_usage as twin
from vllm_kvpolicy.kernels.window_usage import (
    WindowUsage,
    window_usage,
    window_usage_ref,
)

HALF, FULL = torch.float16, torch.float32
SCALE = 0.2
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}
NEAR = 1e-5  # share of a row's mass that rounding may move
FAR = 2**31  # elements that an int32 offset does not reach
SLOW = pytest.mark.slow
Case = tuple[torch.Tensor, PagedTokens, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill new tensors, so that what nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.ones(1).new_empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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
    queries = (2 * torch.randn(shape, generator=generator)).to(dtype)
    num_tokens = num_tokens or int(lengths.max())
    shape = (*lengths.shape, num_tokens, size)
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
    before = window_usage.calls["triton"]
    usage = window_usage(*case, SCALE, mass, sink_logits)
    assert window_usage.calls["triton"] == before + 1
    return usage


def check(
    case: Case, mass: float | None = None, sink_logits: torch.Tensor | None = None
) -> WindowUsage:
    """Compare with the reference; return what the twin found."""
    got, want = (
        run(case, mass, sink_logits),
        window_usage_ref(*case, SCALE, mass, sink_logits),
    )
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


# Two tiles in half precision, five in float32.
RAGGED = torch.tensor([[[300, 17], [1, 256]], [[2, 257], [9, 8]]])
ONE_EVENT, ONE_LAYER = RAGGED[:1], RAGGED[:, :1]
SHAPES = [
    pytest.param({"group": 1, "dtype": FULL}, id="one-head-each"),
    pytest.param({"group": 2, "size": 80, "page_size": 32}, id="pairs"),
    pytest.param({"group": 4, "size": 128, "window": 5}, id="fours", marks=SLOW),
    pytest.param({"window": 1}, id="one-query", marks=SLOW),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: dict) -> None:
    check(make_case(ONE_LAYER, **shape), mass=0.9)


@pytest.mark.parametrize(
    "window, dtype", [(33, FULL), pytest.param(70, HALF, marks=SLOW)]
)
def test_more_queries_than_a_block_holds(window: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([[[90, 34]]])
    check(make_case(lengths, window=window, dtype=dtype, size=80), mass=0.9)


def test_more_tiles_than_are_put_together_at_once() -> None:
    lengths = torch.tensor([[[1100], [1025]]])
    case = make_case(lengths, group=1, window=3, dtype=FULL, num_tokens=1200)
    check(case)
    queries, keys, _ = case
    tokens = keys.dense.clone()
    tokens[:, :, :, 1024:] *= 4  # the largest logits come last
    check((queries, scattered(tokens, lengths, 16), lengths))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_short_requests_shorten_the_window(length: int) -> None:
    case = make_case(torch.tensor([[[length, 20]]]))
    case[0][:, :, :2, : max(0, 8 - length)] = torch.nan  # before the first token
    usage = check(case, mass=0.7)
    assert usage.window.tolist() == [[[min(8, max(length - 1, 1)), 8]]]
    assert usage.last[0, 0, 0, :length].sum() > 0.999


def test_layers_with_a_pool_each(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    original = twin._usage
    monkeypatch.setattr(
        twin, "_usage", lambda *args: launches.append(args) or original(*args)
    )
    queries, keys, lengths = make_case(ONE_EVENT)
    same = [keys.pools[0][:] for _ in keys.pools]  # views of their own, one place
    want = check((queries, replace(keys, pools=same), lengths), mass=0.6)
    assert len(launches) == 1
    apart, num_pages = [], keys.pages[:, 0].numel()
    for layer in range(2):
        size = num_pages + layer, 16, 64
        apart.append(torch.full(size, torch.nan, dtype=HALF)[..., :32])
        apart[layer][:num_pages] = keys.pools[0][keys.pages[:, layer].flatten()]
    pages = torch.arange(num_pages).view(1, 1, 2, -1).repeat(1, 2, 1, 1)
    keys = PagedTokens(apart, pages, keys.num_tokens)
    got = check((queries, keys, lengths), mass=0.6)
    assert len(launches) == 3
    for name in ("mean", "last", "nucleus"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_other_layouts_change_nothing() -> None:
    queries, keys, lengths = make_case(ONE_EVENT)
    want = check((queries, keys, lengths))
    dense = keys.dense
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


@pytest.mark.slow
def test_fewer_queries_are_a_view_of_more() -> None:
    queries, keys, lengths = make_case(ONE_EVENT)
    check((queries[:, :, :, -3:], keys, lengths), mass=0.5)


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
    usage = check(case, mass=0.9)
    assert not usage.mean.isnan().any() and usage.nucleus is not None
    assert (usage.mean[0, 0, 4:6] == 0).all() and (usage.nucleus[0, 0, 2] == 0).all()
    assert (usage.mean[0, 0, :2, [0, 7]] == 0).all()
    on_infinity = usage.last[0, 0, 2:4, [5, 9]]
    assert ((on_infinity == 0) | (on_infinity == 1)).all()


def test_queries_that_are_no_numbers_spoil_their_own_row_only() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[30, 30]]]))
    want = check((queries, keys, lengths), mass=0.9)
    queries = queries.clone()
    queries[0, 0, 1, 3] = torch.nan
    got = check((queries, keys, lengths), mass=0.9)
    assert torch.equal(got.mean[:, :, [0, 2, 3]], want.mean[:, :, [0, 2, 3]])
    assert torch.equal(got.last, want.last)


def test_weights_next_to_nothing_count_as_none() -> None:
    # Logits 0, just above the least weight that counts, just below it, and far below.
    logits = torch.tensor([0.0, -119 * log(2) + 0.01, -119 * log(2) - 0.01, -1e4, 0.0])
    case = rows_of_logits(logits[None])
    usage = check(case)
    assert (usage.last.flatten() > 0).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("mass, count", [(0.3, 3), (0.1, 1), (0.31, 4), (1, 10)])
def test_equal_keys_share_the_mass(mass: float, count: int) -> None:
    """0.3 of ten equal weights is three of them; a float32 0.3 would take four."""
    queries, keys, lengths = make_case(torch.tensor([[[10]]]), window=2)
    keys.dense[:] = keys.dense[:, :, :, :1].clone()
    case = queries, PagedTokens.from_dense(keys.dense), lengths
    usage = check(case, mass)
    assert usage.nucleus is not None and usage.nucleus[0, 0, 0, 1] == count


@pytest.mark.slow
def test_as_many_equal_keys_as_it_takes_behind_a_larger_one() -> None:
    """Weights of 1 and nine times w hold 3/4 with ceil((0.75 (1 + 9 w) - 1) / w)."""
    smaller = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.55, 0.45, 0.35, 0.3])
    logits = torch.cat([torch.zeros(8, 1), smaller.log()[:, None].expand(8, 9)], 1)
    usage = check(rows_of_logits(logits), 0.75)
    want = 1 + ((0.75 * (1 + 9 * smaller) - 1) / smaller).ceil().long()
    assert usage.nucleus is not None and torch.equal(usage.nucleus.flatten(), want)


def test_a_key_that_lacks_half_a_unit_does_not_hold_the_mass() -> None:
    case = rows_of_logits(torch.tensor([[0.0, -40.0]]))  # one unit in 2^32
    mass = (2**32 + 0.5) / (2**32 + 1)
    assert window_usage_ref(*case, SCALE, mass).nucleus == 2
    assert run(case, mass).nucleus == 2


def test_mass_one_is_every_key_that_counts() -> None:
    lengths = torch.tensor([[[300, 40], [5, 1]]])
    queries, keys, _ = make_case(lengths)
    tokens = 20 * keys.dense  # weights far below the unit
    tokens[:, :, :, 2] = torch.nan
    case = queries, scattered(tokens, lengths, 16), lengths
    usage, want = run(case, 1.0), window_usage_ref(*case, SCALE, 1.0)
    assert usage.nucleus is not None and torch.equal(usage.nucleus, want.nucleus)
    assert usage.nucleus[0, 0, 0].tolist() == list(range(292, 300))


@pytest.mark.slow
def test_counts_differ_at_most_within_rounding_of_the_mass() -> None:
    """Rows of two keys, of which the larger holds the mass asked for, or all but."""
    share = 0.75 + torch.linspace(-2e-6, 2e-6, 9)
    logits = (share / (1 - share)).log()
    case = rows_of_logits(torch.stack([logits, torch.zeros(9)], 1))
    usage = check(case, 0.75)
    assert usage.nucleus is not None
    assert usage.nucleus[0].item() == 2 and usage.nucleus[-1].item() == 1


def test_the_check_of_counts_can_fail() -> None:
    case = make_case(torch.tensor([[[30, 30]]]))
    want = window_usage_ref(*case, SCALE, 0.9).nucleus
    assert want is not None
    check_counts(case, 0.9, want)
    for off in (-1, 1):
        with pytest.raises(AssertionError):
            check_counts(case, 0.9, want + off)


@pytest.mark.slow
def test_nuclei_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(torch.tensor([[[60, 33]], [[20, 64]]]), group=1, window=3)
    want = run(case, 0.8)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3 * 4 * 3 * 64)  # three rows of four
    got = run(case, 0.8)
    assert got.nucleus is not None and want.nucleus is not None
    assert torch.equal(got.nucleus, want.nucleus)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_sinks_take_their_share(group: int, apart: bool) -> None:
    queries, keys, lengths = make_case(ONE_EVENT, group=group, window=5)
    sink_logits = torch.linspace(0, 20, 4 * group).view(2, -1)
    if apart:
        keys = replace(keys, pools=[pool.clone() for pool in keys.pools])
    with_sinks = check((queries, keys, lengths), sink_logits=sink_logits)
    without = check((queries, keys, lengths))
    assert with_sinks.last.sum() < 0.9 * without.last.sum()


@pytest.mark.slow
def test_a_sink_above_all_keys_takes_everything() -> None:
    usage = check(make_case(RAGGED), sink_logits=torch.full((2, 4), 1e4))
    assert (usage.mean == 0).all()


def test_a_row_alone_has_the_same_results() -> None:
    queries, keys, lengths = make_case(RAGGED, num_tokens=310)
    together = run((queries, keys, lengths), 0.8)
    for event, layer, head in ((0, 0, 0), (1, 1, 0)):
        at = slice(event, event + 1), slice(layer, layer + 1), slice(head, head + 1)
        group = slice(head * 2, head * 2 + 2)
        length = int(lengths[at])
        pages = keys.pages[at][..., : -(-length // 16)]
        case = (
            queries[at[0], at[1], group].contiguous(),
            PagedTokens(keys.pools[:1], pages, length),
            lengths[at],
        )
        alone = run(case, 0.8)
        for name in ("mean", "last"):
            whole = getattr(together, name)[at[0], at[1], group, :length]
            assert torch.equal(getattr(alone, name), whole)
        assert together.nucleus is not None and alone.nucleus is not None
        assert torch.equal(alone.nucleus, together.nucleus[at])


def test_pages_beyond_int32_are_read(unbacked: Make) -> None:
    queries, keys, lengths = make_case(torch.tensor([[[40, 33]]]))
    want = check((queries, keys, lengths), 0.9)
    page = 16 * 64
    # In the middle, so that an offset that wraps around reads zeros.
    memory = unbacked(2 * FAR + 100 * page, HALF)
    pool = memory[FAR:].as_strided((FAR // page + 50, 16, 32), (page, 64, 1))
    pages = keys.pages + FAR // page
    pool[pages] = keys.pools[0][keys.pages]
    far = PagedTokens([pool], pages, keys.num_tokens)
    got = run((queries, far, lengths), 0.9)
    for name in ("mean", "last", "nucleus"):
        assert torch.equal(getattr(got, name), getattr(want, name))


@pytest.mark.slow
def test_queries_beyond_int32_are_read(unbacked: Make) -> None:
    queries, keys, lengths = make_case(torch.tensor([[[9]], [[12]], [[10]]]))
    want = run((queries, keys, lengths), 0.9)
    stride = FAR // 2 + 16  # fits an int32, twice as much does not
    memory = unbacked(2 * FAR + 2**12, HALF)
    far = memory[FAR:].as_strided(queries.shape, (stride, *queries.stride()[1:]))
    far.copy_(queries)
    got = run((far, keys, lengths), 0.9)
    for name in ("mean", "last", "nucleus"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def test_results_beyond_int32_are_written(unbacked: Make) -> None:
    """One program of pass 2, whose query heads' results lie 2^30 elements apart."""
    queries, keys, lengths = make_case(torch.tensor([[[40]]]), group=4)
    want = run((queries, keys, lengths))
    num_tokens = FAR // 2
    options = twin._options(queries, 1)
    highest, total = torch.zeros(2, 4 * 8)
    pool = keys.pools[0]
    inputs = (
        *(queries, *queries.stride(), pool, *pool.stride(), keys.pages, lengths, SCALE),
        *(num_tokens, keys.pages.shape[-1], 16),
    )
    logits = window_logits(queries[0], keys.dense[0], lengths[0], SCALE)[0, 0]
    highest[:] = logits.amax(-1).flatten()
    total[:] = (logits - logits.amax(-1, keepdim=True)).exp().sum(-1).flatten()
    memory = [unbacked(3 * FAR, FULL)[FAR:] for _ in range(2)]
    twin._usage_of_tiles[(1,)](*inputs, highest, total, *memory, **options)
    for got, name in zip(memory, ("mean", "last"), strict=True):
        found = got.as_strided((4, 40), (num_tokens, 1))
        torch.testing.assert_close(found, getattr(want, name)[0, 0], **TOLERANCE)


def test_refuses_shapes_that_do_not_fit() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[9, 9]]]), group=2)
    for wrong in (queries[:, :, :3], queries[:0], queries[:, :, :, :0]):
        with pytest.raises(ValueError, match="queries: expected"):
            window_usage(wrong, keys, lengths, SCALE)
