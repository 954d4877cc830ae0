"""Window attention in C++; every kind of CPU has to pass these."""

import pytest
import torch

from support.twins_and_references import in_cpp  # noqa: F401
from support.twins_of_window_usage import *  # noqa: F403
from support.twins_of_window_usage import RAGGED, SCALE, check_twin, make_case, run
from vllm_kvpolicy.kernels.paged import PagedTokens
from vllm_kvpolicy.kernels.window_usage import window_usage, window_usage_ref

pytestmark = pytest.mark.usefixtures("in_cpp")


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 3, "size": 64, "window": 32, "page_size": 32},
        {"group": 4, "size": 37, "window": 5, "page_size": 7},
        {"window": 70, "group": 1},
        {},
    ],
    ids=str,
)
def test_every_layer_in_bfloat16(shape: dict) -> None:
    case = make_case(RAGGED, dtype=torch.bfloat16, **shape)
    want = window_usage_ref(*case, SCALE, 0.9).nucleus
    found = check_twin(case, mass=0.9).nucleus
    assert found is not None and want is not None and torch.equal(found, want)


def test_lengths_may_be_a_broadcast_view() -> None:
    queries, keys, _ = make_case(torch.full((2, 2, 2), 90))
    check_twin((queries, keys, torch.tensor(90).expand(2, 2, 2)))


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


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    case = make_case(RAGGED)
    before, want = torch.get_num_threads(), run(case)
    torch.set_num_threads(threads)
    try:
        got = run(case)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got.mean, want.mean) and torch.equal(got.last, want.last)


def test_shapes_that_do_not_fit_are_refused() -> None:
    queries, keys, lengths = make_case(torch.tensor([[[30, 30, 30]]]))
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
