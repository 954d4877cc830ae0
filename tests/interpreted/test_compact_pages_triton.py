"""The twin in Triton that moves tokens, in tiles of a few and of the real size.

The interpreter runs programs, and what threads of one would do at once, one after the
other: it shows tiles in the wrong order and tokens that are overwritten before they are
read, but no race. tests/kernels/test_triton_compiles.py looks for the barrier.
"""

from random import Random

import pytest
import torch

from support.twins_of_moves import *  # noqa: F403
from support.worker.page_moves import check_moves, make_pages, random_layout
from vllm_kvpolicy.kernels.compact_pages import compact_pages


@pytest.fixture(scope="module")
def takes_columns() -> bool:
    return False


def test_scratch_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that does not pass through scratch does not come out of it."""
    made = []
    new_empty = torch.Tensor.new_empty

    def poisoned(pages: torch.Tensor, *shape: int, **options) -> torch.Tensor:
        if options:  # the interpreter's own
            return new_empty(pages, *shape, **options)
        made.append(new_empty(pages, *shape).fill_(torch.nan))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    layout = random_layout(Random(2), 4, [9, 5, 7], 30, 0.6)
    block_size, num_pages, heads = layout
    moves = [list(head.moves(block_size)) for head in heads]
    check_moves(compact_pages, make_pages(num_pages, block_size, False), moves)
    assert [scratch.shape[0] for scratch in made] == [sum(map(len, moves))]
    assert made[0].isnan().any() and not made[0].isnan().all()


def test_keys_in_columns_are_refused() -> None:
    slot = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="pages: expected contiguous channels"):
        compact_pages(make_pages(2, 4, True), slot, slot, torch.tensor([0, 1]))
