"""Grids fit CUDA, where only the first axis may have more than 65,535 programs."""

from functools import partial
from typing import Any

import pytest
import torch

from vllm_kvpolicy.kernels.triton import compact_pages, page_tables

LIMIT = 65_535
EVENTS, HEADS, TOKENS, BLOCK = 2, 80 * 8, 131_072, 16
PLACES = HEADS * TOKENS
empty, int32, float32 = (
    partial(torch.empty, dtype=dtype, device="meta")
    for dtype in (torch.int64, torch.int32, torch.float32)
)


class Launches:
    """Stands for a kernel and remembers the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def moves() -> None:
    """Launch the moves of the largest events."""
    held, pages = empty(EVENTS, HEADS, TOKENS // BLOCK), empty(EVENTS, PLACES // BLOCK)
    lists = empty(EVENTS, PLACES), held, empty(EVENTS, HEADS + 1), pages
    compact_pages.survivor_moves(*lists, None, TOKENS, BLOCK)


def page_lists() -> None:
    """Enter page lists as long as lists of tokens."""
    dest = empty(EVENTS, PLACES // HEADS)
    lists = empty(EVENTS), dest, empty(EVENTS, HEADS + 1), empty(EVENTS, PLACES)
    page_tables.enter_page_lists(int32(4, HEADS), int32(4, HEADS + 1), *lists)


def memory() -> None:
    """Write what is remembered of the survivors of the largest events."""
    tables = float32(2, 4, HEADS * BLOCK), float32(2, 4, HEADS, 64)
    values = float32(2, EVENTS, HEADS, TOKENS)
    given = empty(2), empty(EVENTS), values, empty(EVENTS, PLACES)
    counts = empty(EVENTS, HEADS), empty(EVENTS)
    compact_pages.write_survivors(*tables, *given, *counts, int32(4, TOKENS // BLOCK))


@pytest.mark.parametrize(
    ("module", "kernel", "launch"),
    [
        (compact_pages, "_survivor_moves", moves),
        (page_tables, "_enter_page_lists", page_lists),
        (compact_pages, "_write_survivors", memory),
    ],
)
def test_events_of_long_requests_fit(
    module: Any, kernel: str, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All survive: 80 layers of 8 heads, 131,072 tokens each."""
    launches = Launches()
    monkeypatch.setattr(module, kernel, launches)
    launch()
    (grid,) = launches.grids
    assert grid[0] > LIMIT, "a test of the limit needs a large grid"
    assert all(size <= LIMIT for size in grid[1:]), grid
