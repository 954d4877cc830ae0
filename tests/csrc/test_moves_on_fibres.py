"""Kernels that move tokens and fill tables, in CUDA C++ on a CPU: as the references.

What nvcc compiles runs here with a fibre per thread; see cuda_on_fibres_library.py.
"""

import mmap
from random import Random

import pytest
import torch

from benchmarks.gpu.kernel_checks import check_operation
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, SMALL_SIZES, Size
from support.twins_of_moves import *  # noqa: F403
from support.twins_of_moves import make_pool
from support.twins_of_page_tables import *  # noqa: F403
from support.twins_of_page_tables import POISON, table_arguments
from support.worker.page_moves import check_moves, move_arguments, random_layout
from vllm_kvpolicy.kernels.compact_pages import compact_pages, compact_pages_ref
from vllm_kvpolicy.kernels.page_tables import page_tables, page_tables_ref
from vllm_kvpolicy.kernels.preferences import has

# Beyond what 32 bits count, with or without a sign, in numbers and in bytes.
DISTANCE = 2**32 + 64
MAP_NORESERVE = 0x4000  # of Linux; Python has no name for it


def far_rows(
    rows: int, columns: int, dtype: torch.dtype, distance: int = DISTANCE
) -> torch.Tensor:
    """Return zeros.

    Args:
        rows: R.
        columns: T.
        dtype: of the numbers.
        distance: numbers between two rows.

    Returns:
        [R, T], strides (distance, 1).
    """
    count = (rows - 1) * distance + columns
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    numbers = torch.frombuffer(memory, dtype=dtype)
    return numbers.as_strided((rows, columns), (distance, 1))


def moved_far(near: torch.Tensor, distance: int = DISTANCE) -> torch.Tensor:
    """Return a copy [R, T] with rows far apart."""
    far = far_rows(*near.shape, near.dtype, distance)
    far.copy_(near)
    return far


IN_CUDA = [label for label in MAKERS if has(label.partition(",")[0], "cuda")]
SIZES = {
    **SMALL_SIZES,
    "real": Size(1, 1, 2, 4, 1536, 128, 32, 1024, 16, torch.bfloat16),
    "half": Size(1, 2, 1, 2, 2600, 80, 8, 2048, 32, torch.float16),
}
pytestmark = pytest.mark.usefixtures("on_fibres")


@pytest.fixture(scope="module")
def takes_columns() -> bool:
    return False


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("label", IN_CUDA)
def test_every_twin_as_on_a_gpu(
    label: str, size: str, generator: torch.Generator
) -> None:
    seed = generator.initial_seed()
    assert check_operation(label, SIZES[size], seed, CPU, ["cuda"]) == []


# -- compact_pages ---------------------------------------------------------------------


def far_pages(count: int, width: int) -> torch.Tensor:
    """Return pages of one token each, so far apart that 32 bits count some of them."""
    distance = DISTANCE // 8
    slots = far_rows(count, width, torch.int8, distance)
    slots.copy_(make_pool((count, width), torch.int8))
    return slots.as_strided((count, 1, width), (distance, distance, 1))


@pytest.mark.parametrize("loyalty", [0.5, 1.0])
@pytest.mark.parametrize("width", [16, 12, 3])
def test_slots_far_apart(
    loyalty: float, width: int, generator: torch.Generator
) -> None:
    rng = Random(generator.initial_seed())
    layout = random_layout(rng, 1, [9, 6], 17, loyalty, 0.5)
    rows = [list(head.moves(1)) for head in layout[2]]
    pages = far_pages(17, width)
    check_moves(compact_pages, pages, rows, loyalty < 1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("dest_slots", torch.zeros(2, dtype=torch.int32)),
        ("dest_slots", torch.zeros(1, dtype=torch.int64)),
        ("source_slots", torch.zeros(4, dtype=torch.int64)[::2]),
        ("first", torch.zeros(2, 1, dtype=torch.int64)),
        ("in_place", torch.zeros(2, dtype=torch.uint8)),
        ("in_place", torch.zeros(3, dtype=torch.bool)),
    ],
)
def test_other_lists_are_refused(name: str, wrong: torch.Tensor) -> None:
    slot = torch.zeros(2, dtype=torch.int64)
    given = {
        "pages": torch.zeros(1, 16, 8),
        "source_slots": slot,
        "dest_slots": slot,
        "first": torch.tensor([0, 2]),
        "in_place": slot == 0,
    }
    compact_pages(*given.values())
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        compact_pages(*(given | {name: wrong}).values())


def test_the_reference_agrees_about_far_slots(generator: torch.Generator) -> None:
    """Far memory holds what is written into it."""
    layout = random_layout(Random(generator.initial_seed()), 1, [9], 10, 1.0, 0.5)
    rows = [list(layout[2][0].moves(1))]
    pages = far_pages(10, 4)
    expected = pages.clone()
    compact_pages_ref(expected, *move_arguments(rows))
    check_moves(compact_pages_ref, pages, rows)
    assert torch.equal(pages, expected)


# -- page_tables -----------------------------------------------------------------------


def test_tables_far_apart() -> None:
    slot, table, tokens, blocks, *rest = table_arguments(4, 40, 9, 40)
    slot[:] = torch.tensor([6, 0, 3, 2])
    expected, tables = torch.zeros(4, 40, dtype=torch.int32), moved_far(table)
    lengths = torch.full((2, 4), POISON, dtype=torch.int32)
    page_tables(tables, lengths[0], slot, moved_far(table), tokens, blocks, *rest)
    page_tables_ref(expected, lengths[1], slot, table, tokens, blocks, *rest)
    assert torch.equal(tables, expected) and torch.equal(*lengths)
    page_tables(tables, lengths[0], slot, table, tokens, moved_far(blocks), *rest)
    assert torch.equal(tables, expected) and torch.equal(*lengths)


@pytest.mark.parametrize("place", range(9))
def test_other_tables_are_refused(place: int) -> None:
    given = [
        torch.zeros(3, 9, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        *table_arguments(3, 9, 4, 9),
    ]
    page_tables(*given)
    other = torch.int64 if given[place].dtype == torch.int32 else torch.int32
    for wrong in (given[place].to(other), given[place][..., :0], given[place][None]):
        if wrong.shape[-1] == 0 and wrong.dim() == 2:
            continue  # fewer columns are no mistake
        with pytest.raises(RuntimeError, match="expected"):
            page_tables(*given[:place], wrong, *given[place + 1 :])
