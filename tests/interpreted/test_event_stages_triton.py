"""The stages of an event in Triton; those without a twin in C++ are compared here."""

import pytest
import torch

from support.twins_and_references import check_call, check_tables
from support.twins_of_stages import *  # noqa: F403
from support.twins_of_stages import (
    BLOCKS,
    DEST,
    EVENTS,
    NUM_HEADS,
    SEEDS,
    SLOTS,
    draw,
    first_of,
    integers,
    lists_of,
    order,
)
from vllm_kvpolicy.kernels.assign_pages import assign_pages, count_in_pages, page_quota
from vllm_kvpolicy.kernels.page_tables import enter_page_lists, enter_requests


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_page_quota(seed: int, block_size: int, fills: bool) -> None:
    by = draw(seed)
    tokens, floors = (integers(0, most, (5, 11), by) for most in (90, 4))
    caps = floors + integers(0, 7, (5, 11), by)
    total = torch.tensor([0, 1, 30, 60, 10_000])
    for most in (89, 2**20):
        check_call(page_quota, tokens, floors, caps, total, block_size, most, fills)


@pytest.mark.parametrize("seed", SEEDS)
def test_assign_pages(seed: int) -> None:
    check_call(assign_pages, *lists_of(seed))


def test_enter_requests_and_lists() -> None:
    by = draw(0)
    index, dest = order(SLOTS, (EVENTS,), by), order(BLOCKS, (EVENTS, DEST), by)
    tables = [integers(0, 9, shape, by).int() for shape in ((SLOTS, 9), (SLOTS,))]
    tables += [tables[1] + 1, tables[1] + 2]
    numbers = dest[:, 0], dest[:, 1]
    check_tables(enter_requests, tables, index, dest, *numbers, last=True)
    quota = integers(0, DEST, (EVENTS, NUM_HEADS), by)
    pages = order(99, (EVENTS, DEST * NUM_HEADS), by)
    shapes = (BLOCKS, NUM_HEADS), (SLOTS, NUM_HEADS + 1)
    tables = [integers(0, 9, shape, by).int() for shape in shapes]
    check_tables(enter_page_lists, tables, index, dest, first_of(quota), pages)


@pytest.mark.parametrize("tokens", [5, 300, 8200])
@pytest.mark.parametrize("page", [1, 3, 16])
def test_count_in_pages(page: int, tokens: int) -> None:
    by = draw(tokens)
    keep = torch.rand(6, tokens, generator=by) < 0.4
    pages = integers(0, tokens // page + 2, (6,), by)
    check_call(count_in_pages, keep, pages, page)
