"""Page tables of both kinds and saved rows in Triton, against their references."""

import pytest
import torch

from support.twins_of_page_tables import *  # noqa: F403
from support.twins_of_page_tables import POISON
from vllm_kvpolicy.kernels.page_tables import head_page_tables, head_page_tables_ref
from vllm_kvpolicy.kernels.save_rows import save_rows, save_rows_ref


@pytest.mark.parametrize("parts", [1, 3, 4])
@pytest.mark.parametrize("size", [32, 240, 1024, 1100])
def test_parts_go_where_they_should(parts: int, size: int) -> None:
    """A query of three parts begins in one superblock and ends in another."""
    generator = torch.Generator().manual_seed(1)
    tokens, places, width = 9, 40, parts * size
    queries = torch.randn(tokens, 3 * width, generator=generator)
    queries = queries[:, width : 2 * width]  # a part of q, k and v
    targets = torch.zeros(tokens + 4, parts, dtype=torch.int64)
    # Superblocks 4 and 2 of 8 rows: the window's rows 0 to 7 are 32 to 39, then 16 on.
    order = torch.cat([torch.arange(32, 40), torch.arange(16, 24)])
    kept = [0, 3, 4, 8]
    targets[kept] = order[: 4 * parts].view(4, parts)
    targets[tokens:] = 7  # of no token
    saved = torch.full((2, places, size), float(POISON))
    save_rows(saved[0], queries, targets)
    save_rows_ref(saved[1], queries, targets)
    assert torch.equal(saved[0, 1:], saved[1, 1:])
    assert torch.equal(saved[0, order[: 4 * parts]].view(4, width), queries[kept])
    untouched = torch.ones(places, dtype=torch.bool)
    untouched[order[: 4 * parts]] = untouched[0] = False
    assert (saved[:, untouched] == POISON).all()
    assert (saved[0, 0] == POISON).all(), "the kernel drops what is not wanted"


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
    in_all = -(-int(counts.sum(-1).max()) // count)  # superblocks of the longest lists
    owned = torch.randperm(slots * (in_all + 1), generator=generator).int()
    given = (
        torch.randperm(batch, generator=generator)[:rows],
        draw(slots, rows).long(),
        draw(20, batch, columns),
        skip,
        draw(4, slots),
        owned.view(slots, -1),
        draw(2**30, len(owned), count),
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
