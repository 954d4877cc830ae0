"""The stages of an event in Triton equal their references, number for number.

Operations run in Triton here (see conftest.py). Fresh memory is poisoned.
"""

from collections.abc import Iterator

import pytest
import torch

from support.stage_checks import (
    BLOCKS,
    COUNTS,
    DEST,
    EVENTS,
    LAYERS,
    NUM_HEADS,
    SEEDS,
    SLOTS,
    both,
    check_credited_mass,
    check_limit_must_keep,
    check_lists_and_moves,
    check_must_keep_tokens,
    check_pooled_usage,
    check_survivor_values,
    draw,
    first_of,
    integers,
    lists_of,
    order,
)
from vllm_kvpolicy.kernels.assign_pages import assign_pages, assign_pages_ref
from vllm_kvpolicy.kernels.page_quota import page_quota, page_quota_ref
from vllm_kvpolicy.kernels.page_tables import (
    enter_page_lists,
    enter_page_lists_ref,
    enter_requests,
    enter_requests_ref,
)
from vllm_kvpolicy.kernels.pooled_usage import SUFFIX_PADS


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_page_quota(seed: int, block_size: int, fills: bool) -> None:
    by = draw(seed)
    tokens, floors = (integers(0, most, (5, 11), by) for most in (90, 4))
    caps = floors + integers(0, 7, (5, 11), by)
    total = torch.tensor([0, 1, 30, 60, 10_000])
    for most in (89, 2**20):
        given = tokens, floors, caps, total, block_size, most, fills
        assert torch.equal(page_quota(*given), page_quota_ref(*given))


@pytest.mark.parametrize("seed", SEEDS)
def test_assign_pages(seed: int) -> None:
    for groups in (1, LAYERS):
        given = lists_of(seed, groups)
        got, want = assign_pages(*given), assign_pages_ref(*given)
        assert torch.equal(got.first, want.first)
        assert torch.equal(got.pages, want.pages)
        assert want.unmoved is not None and torch.equal(got.unmoved, want.unmoved)


@pytest.mark.parametrize("groups", [1, LAYERS])
@pytest.mark.parametrize("seed", SEEDS)
def test_lists_and_moves(seed: int, groups: int) -> None:
    check_lists_and_moves(seed, groups)


def test_enter_requests_and_lists() -> None:
    by = draw(0)
    index, dest = order(SLOTS, (EVENTS,), by), order(BLOCKS, (EVENTS, DEST), by)
    tables = [integers(0, 9, shape, by).int() for shape in ((SLOTS, 9), (SLOTS,))]
    tables.append(tables[1] + 1)
    both(enter_requests, enter_requests_ref, tables, index, dest, dest[:, 0], last=True)
    quota = integers(0, 5, (EVENTS, NUM_HEADS), by)
    pages = order(99, (EVENTS, 30), by)
    tables = [integers(0, 9, (SLOTS, size), by).int() for size in (40, NUM_HEADS + 1)]
    lists = index, first_of(quota), pages
    got, want = both(enter_page_lists, enter_page_lists_ref, tables, *lists)
    assert torch.equal(got, want)


@pytest.mark.parametrize("seed", SEEDS)
def test_survivor_values(seed: int) -> None:
    check_survivor_values(seed)


@pytest.mark.parametrize("suffix", SUFFIX_PADS)
@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("tokens", COUNTS)
def test_pooled_usage(tokens: int, kernel: int, suffix: str) -> None:
    check_pooled_usage(tokens, kernel, suffix)


@pytest.mark.parametrize("tokens", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_credited_mass(tokens: int, dtype: torch.dtype) -> None:
    check_credited_mass(tokens, dtype)


@pytest.mark.parametrize("tokens", COUNTS)
def test_must_keep(tokens: int) -> None:
    check_limit_must_keep(tokens)
    check_must_keep_tokens(tokens)
