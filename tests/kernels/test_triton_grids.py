"""Grids fit CUDA, where only the first axis may have more than 65,535 programs."""

from typing import Any

import pytest
import torch

from vllm_kvpolicy.kernels.triton import compact_pages, page_tables

LIMIT = 65_535
EVENTS, HEADS, TOKENS, BLOCK = 2, 80 * 8, 131_072, 16
PLACES = HEADS * TOKENS


class Launches:
    """Stands for a kernel and remembers the grids of its launches."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def moves() -> None:
    """Launch the moves of the largest events."""
    pages = empty(EVENTS, PLACES // BLOCK)
    compact_pages.survivor_moves(
        empty(EVENTS, PLACES),
        empty(EVENTS, HEADS, TOKENS // BLOCK),
        empty(EVENTS, HEADS + 1),
        pages,
        None,
        TOKENS,
        BLOCK,
        1,
    )


def page_lists() -> None:
    """Enter page lists as long as lists of tokens."""
    cells = PLACES
    page_tables.enter_page_lists(
        empty(4, cells, dtype=torch.int32),
        empty(4, HEADS + 1, dtype=torch.int32),
        empty(EVENTS),
        empty(EVENTS, HEADS + 1),
        empty(EVENTS, cells),
    )


def memory() -> None:
    """Write what is remembered of the survivors of the largest events."""
    compact_pages.write_survivors(
        empty(2, 4, HEADS * BLOCK, dtype=torch.float32),
        empty(2, 4, HEADS, 64, dtype=torch.float32),
        empty(2),
        empty(EVENTS),
        empty(2, EVENTS, HEADS, TOKENS, dtype=torch.float32),
        empty(EVENTS, PLACES),
        empty(EVENTS, HEADS),
        empty(EVENTS),
        empty(4, TOKENS // BLOCK, dtype=torch.int32),
    )


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
