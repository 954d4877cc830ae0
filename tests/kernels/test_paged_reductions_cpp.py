"""Lengths and squares of keys in C++; what it refuses."""

from dataclasses import replace

import pytest
import torch

from support.scattered_pages import scattered
from support.twins_and_references import in_cpp  # noqa: F401
from support.twins_of_reductions import *  # noqa: F403
from support.twins_of_reductions import check_twin, make_case
from vllm_kvpolicy.kernels import paged_reductions as operations

pytestmark = pytest.mark.usefixtures("in_cpp")


@pytest.fixture(params=["paged_norms", "paged_quadratics"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [1, 33, 64])
def test_layouts_in_bfloat16(name: str, size: int, columns: bool) -> None:
    """Keys in columns are added up in another order."""
    keys, *given = make_case(size=size, dtype=torch.bfloat16)
    check_twin(name, (scattered(keys.dense, given[0], 16, columns), *given))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(name: str, threads: int) -> None:
    case = make_case()
    before, want = torch.get_num_threads(), check_twin(name, case)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(check_twin(name, case), want)
    finally:
        torch.set_num_threads(before)


def test_a_head_without_tokens_has_no_values(name: str) -> None:
    keys, _, given = make_case(torch.tensor([[[30, 30]]]))
    got = check_twin(name, (keys, torch.tensor([[[0, 20]]]), given))
    assert (got.chunk(2, dim=2)[0] == 0).all()


def test_what_does_not_fit_is_refused() -> None:
    keys, lengths, given = make_case()
    along, matrices = given["paged_quadratics"]
    with pytest.raises(ValueError, match="matrices: expected"):
        operations.paged_quadratics(keys, lengths, along, along)
    with pytest.raises(RuntimeError, match="lengths: expected 0 to 150, got 151"):
        operations.paged_norms(keys, lengths + 1)
    with pytest.raises(RuntimeError, match="matrices: expected another dtype"):
        operations.paged_quadratics(keys, lengths, along, matrices.double())
    with pytest.raises(RuntimeError, match="pages: expected room for 161 tokens"):
        operations.paged_norms(replace(keys, num_tokens=161), lengths)
