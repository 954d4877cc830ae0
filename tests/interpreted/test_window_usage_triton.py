"""Window attention in Triton: nuclei, tiles, and offsets beyond 32 bits."""

from dataclasses import replace

import pytest
import torch

from support.scattered_pages import FAR, Make, far_away, scattered
from support.twins_of_window_usage import *  # noqa: F403
from support.twins_of_window_usage import (
    FULL,
    HALF,
    SCALE,
    SMALL,
    TOLERANCE,
    check_counts,
    check_twin,
    make_case,
    rows_of_logits,
    run,
)
from vllm_kvpolicy.kernels import chunks
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.softmax import window_logits
from vllm_kvpolicy.kernels.triton import window_usage as twin
from vllm_kvpolicy.kernels.window_usage import window_usage_ref


def test_more_tiles_than_are_put_together_at_once() -> None:
    lengths = torch.tensor([[[1100], [1025]]])
    case = make_case(lengths, group=1, window=3, dtype=FULL, num_tokens=1200)
    queries, keys, _ = case
    tokens = keys.dense.clone()
    tokens[:, :, :, 1024:] *= 4  # the largest logits come last
    check_twin((queries, scattered(tokens, lengths, 16), lengths))


def test_layers_of_one_pool_share_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, original = [], twin._usage
    monkeypatch.setattr(
        twin, "_usage", lambda *args: launches.append(args) or original(*args)
    )
    queries, keys, lengths = make_case(torch.tensor([[[9, 4], [3, 12]]]))
    same = [keys.pools[0][:] for _ in keys.pools]  # views of their own, one place
    want = run((queries, replace(keys, pools=same), lengths))
    assert len(launches) == 1
    apart = [pool.clone() for pool in keys.pools]
    got = run((queries, replace(keys, pools=apart), lengths))
    assert len(launches) == 3 and torch.equal(got.mean, want.mean)


@pytest.mark.slow
def test_fewer_queries_are_a_view_of_more() -> None:
    queries, keys, lengths = make_case(SMALL)
    check_twin((queries[:, :, :, -3:], keys, lengths), mass=0.5)


@pytest.mark.parametrize("mass, count", [(0.3, 3), (0.1, 1), (0.31, 4), (1, 10)])
def test_equal_keys_share_the_mass(mass: float, count: int) -> None:
    """0.3 of ten equal weights is three of them; a float32 0.3 would take four."""
    queries, keys, lengths = make_case(torch.tensor([[[10]]]), window=2)
    keys.dense[:] = keys.dense[:, :, :, :1].clone()
    case = queries, PagedTokens.from_dense(keys.dense), lengths
    usage = check_twin(case, mass)
    assert usage.nucleus is not None and usage.nucleus[0, 0, 0, 1] == count


@pytest.mark.slow
def test_as_many_equal_keys_as_it_takes_behind_a_larger_one() -> None:
    """Weights of 1 and nine times w hold 3/4 with ceil((0.75 (1 + 9 w) - 1) / w)."""
    smaller = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.55, 0.45, 0.35, 0.3])
    logits = torch.cat([torch.zeros(8, 1), smaller.log()[:, None].expand(8, 9)], 1)
    usage = check_twin(rows_of_logits(logits), 0.75)
    want = 1 + ((0.75 * (1 + 9 * smaller) - 1) / smaller).ceil().long()
    assert usage.nucleus is not None and torch.equal(usage.nucleus.flatten(), want)


def test_a_key_that_lacks_half_a_unit_does_not_hold_the_mass() -> None:
    case = rows_of_logits(torch.tensor([[0.0, -40.0]]))  # one unit in 2^32
    mass = (2**32 + 0.5) / (2**32 + 1)
    assert window_usage_ref(*case, SCALE, mass).nucleus == 2
    assert run(case, mass).nucleus == 2


def test_mass_one_is_every_key_that_counts() -> None:
    lengths = torch.tensor([[[100, 40], [5, 1]]])
    queries, keys, _ = make_case(lengths)
    tokens = 20 * keys.dense  # weights far below the unit
    tokens[:, :, :, 2] = torch.nan
    case = queries, scattered(tokens, lengths, 16), lengths
    usage, want = run(case, 1.0), window_usage_ref(*case, SCALE, 1.0)
    assert usage.nucleus is not None and torch.equal(usage.nucleus, want.nucleus)
    assert usage.nucleus[0, 0, 0].tolist() == list(range(92, 100))


@pytest.mark.slow
def test_counts_differ_at_most_within_rounding_of_the_mass() -> None:
    """Rows of two keys, of which the larger holds the mass asked for, or all but."""
    share = 0.75 + torch.linspace(-2e-6, 2e-6, 9)
    logits = (share / (1 - share)).log()
    case = rows_of_logits(torch.stack([logits, torch.zeros(9)], 1))
    usage = check_twin(case, 0.75)
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


def test_pages_beyond_int32_are_read(unbacked: Make) -> None:
    queries, keys, lengths = make_case(torch.tensor([[[40, 33]]]))
    want = run((queries, keys, lengths), 0.9)
    got = run((queries, far_away(keys, unbacked), lengths), 0.9)
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
