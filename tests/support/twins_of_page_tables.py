"""Tests of the tables that stock attention reads, which twins on a GPU pass."""

import pytest
import torch

from vllm_kvpolicy.kernels.page_tables import page_tables, page_tables_ref

POISON = -77


def table_arguments(
    rows: int, columns: int, most: int, width: int
) -> tuple[torch.Tensor | int, ...]:
    """Return what page_tables takes, but for what it writes; slot 0 is nobody's."""
    generator = torch.Generator().manual_seed(rows)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    slots = 7
    num_global = draw(min(most, width) + 1, slots)
    skip = num_global + draw(max(columns - most, 1), slots)
    pinned = draw(min(5, width), slots)
    num_global[0] = skip[0] = pinned[0] = 0
    return (
        draw(slots, rows).long(),
        draw(10_000, rows, columns),
        draw(50_000, rows) + 16 * columns,
        draw(10_000, slots, most),
        num_global,
        skip,
        pinned,
        16,
    )


@pytest.mark.parametrize(
    ("rows", "columns", "width", "most"),
    [(1, 1, 1, 1), (3, 9, 5, 4), (5, 700, 600, 300), (4, 300, 257, 290), (2, 9, 9, 1)],
)
def test_tables_and_lengths(rows: int, columns: int, width: int, most: int) -> None:
    """As views of larger tensors, as the tables of a batch are."""
    given = table_arguments(rows, columns, most, width)
    storage = torch.full((2, rows + 2, columns), POISON, dtype=torch.int32)
    lengths = torch.full((2, rows), POISON, dtype=torch.int32)
    for which, run in enumerate((page_tables, page_tables_ref)):
        run(storage[which, 1:-1, :width], lengths[which], *given)
    assert torch.equal(storage[0], storage[1]) and torch.equal(*lengths)
    assert (storage[0, 1:-1, :width] != POISON).all()
    outside = storage[0].clone()
    outside[1:-1, :width] = POISON
    assert (outside == POISON).all()
