"""Page tables and saved rows in Triton, against their references."""

import pytest
import torch

from vllm_kvpolicy.kernels.page_tables import page_tables, page_tables_ref
from vllm_kvpolicy.kernels.save_rows import save_rows, save_rows_ref

POISON = -77


@pytest.mark.parametrize(
    ("rows", "columns", "width", "most"),
    [(1, 1, 1, 1), (3, 9, 5, 4), (5, 700, 600, 300), (4, 300, 257, 290)],
)
def test_tables_and_lengths(rows: int, columns: int, width: int, most: int) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    slots = 7
    num_global = draw(min(most, width) + 1, slots)
    frontier = num_global + draw(max(columns - most, 1), slots)
    num_global[0] = frontier[0] = 0  # nobody's slot
    given = (
        draw(slots, rows).long(),
        draw(10_000, rows, columns),
        draw(50_000, rows) + 16 * columns,
        draw(10_000, slots, most),
        num_global,
        frontier,
        16,
    )
    # Views of larger tensors, as the tables of a batch are.
    storage = torch.full((2, rows + 2, columns), POISON, dtype=torch.int32)
    lengths = torch.full((2, rows), POISON, dtype=torch.int32)
    for which, run in enumerate((page_tables, page_tables_ref)):
        run(storage[which, 1:-1, :width], lengths[which], *given)
    assert torch.equal(storage[0], storage[1]) and torch.equal(*lengths)
    assert (storage[0, 1:-1, :width] != POISON).all()
    outside = storage[0].clone()
    outside[1:-1, :width] = POISON
    assert (outside == POISON).all()


@pytest.mark.parametrize("shape", [(2, 32), (3, 80), (32, 128)])
def test_rows_go_where_they_should(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    size, nobody, tokens = shape[0] * shape[1], 11, 9
    queries = torch.randn(tokens, 3 * size, generator=generator)
    queries = queries[:, size : 2 * size].unflatten(1, shape)  # a part of q, k and v
    targets = torch.full((tokens + 4,), nobody)
    targets[[0, 3, 4, 8]] = torch.tensor([10, 0, 5, 7])
    saved = torch.full((2, nobody + 1, *shape), float(POISON))
    save_rows(saved[0], queries, targets)
    save_rows_ref(saved[1], queries, targets)
    assert torch.equal(saved[0, :-1], saved[1, :-1])
    assert torch.equal(saved[0, 5], queries[4]) and (saved[0, 1] == POISON).all()
