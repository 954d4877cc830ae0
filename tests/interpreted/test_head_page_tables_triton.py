"""Page lists per head in Triton, against the reference."""

import pytest
import torch

from vllm_kvpolicy.kernels.page_tables import (
    head_page_tables,
    head_page_tables_ref,
)

POISON = -77


@pytest.mark.parametrize(
    ("layers", "heads", "rows", "columns", "width", "most"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 4, 9, 5, 4),
        (3, 2, 5, 40, 40, 30),
        (1, 2, 3, 700, 600, 300),
        (2, 2, 2, 300, 257, 290),
    ],
)
@pytest.mark.parametrize("far", [False, True])
def test_rows_of_every_head(
    layers: int, heads: int, rows: int, columns: int, width: int, most: int, far: bool
) -> None:
    """Some rows of a batch are filled, as views of larger tensors; others stay."""
    generator = torch.Generator().manual_seed(columns)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    slots, count = 6, layers * heads
    counts = draw(most + 1, slots, count)
    counts[-1] = 0  # nobody's slot
    skip = draw(columns, slots)
    # Ids of large pools: beyond 2^24, where float32 would round.
    stride = 50_000_001 if far else heads
    own_page = torch.arange(count) * 7 + (1_000_000_000 if far else 0)
    batch = rows + 2
    given = (
        torch.randperm(batch, generator=generator)[:rows],
        draw(slots, rows).long(),
        draw(20, batch, columns),
        skip,
        draw(2**30, slots, int(counts.sum(-1).max()) + 1),
        torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).int(),
        own_page,
        stride,
    )
    storage = torch.full(
        (2, layers, batch + 1, heads, width + 3), POISON, dtype=torch.int32
    )
    offsets = torch.full((2, layers, batch + 1, heads), POISON, dtype=torch.int32)
    for which, run in enumerate((head_page_tables, head_page_tables_ref)):
        run(storage[which, :, :batch, :, :width], offsets[which, :, :batch], *given)
    assert torch.equal(*storage) and torch.equal(*offsets)
    filled, outside = given[0], storage[0].clone()
    assert (storage[0][:, filled, :, :width] >= 0).all()
    outside[:, filled, :, :width] = POISON
    assert (outside == POISON).all()
