"""Kernels that move tokens and fill tables, in CUDA C++ on a CPU: as the references.

What nvcc compiles runs here with a fibre per thread; see cuda_on_fibres_library.py.
"""

import mmap
from random import Random

import pytest
import torch

from benchmarks.gpu.kernel_checks import check_operation
from benchmarks.gpu.kernel_inputs import CPU, MAKERS, SMALL_SIZES, Size, operations
from support.worker.page_moves import (
    INTEGERS,
    Rows,
    check_moves,
    move_arguments,
    random_layout,
)
from vllm_kvpolicy.kernels import compact_pages as compaction
from vllm_kvpolicy.kernels.compact_pages import compact_pages, compact_pages_ref
from vllm_kvpolicy.kernels.page_tables import page_tables, page_tables_ref

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


IN_CUDA = [
    label
    for label in MAKERS
    if operations()[label.partition(",")[0]].preference.in_cuda
]
SIZES = {
    **SMALL_SIZES,
    "real": Size(1, 1, 2, 4, 1536, 128, 32, 1024, 16, torch.bfloat16),
    "half": Size(1, 2, 1, 2, 2600, 80, 8, 2048, 32, torch.float16),
}
NOBODY = [(0, 0, True), (0, 0, False)]
POISON = -77


@pytest.mark.usefixtures("on_fibres")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("label", IN_CUDA)
def test_every_twin_as_on_a_gpu(
    label: str, size: str, generator: torch.Generator
) -> None:
    seed = generator.initial_seed()
    assert check_operation(label, SIZES[size], seed, CPU, ["cuda"]) == []


def test_which_operations_have_a_twin() -> None:
    names = {label.partition(",")[0] for label in IN_CUDA}
    assert names == {"compact_pages", "page_tables"}


# -- compact_pages ---------------------------------------------------------------------


def rows_of(rng: Random, block_size: int, loyalty: float) -> tuple[int, Rows]:
    """Return pages, and moves of ragged rows with survivors of nobody between them."""
    sizes = [rng.randint(0, 800 // block_size), 0, rng.randint(1, 4), 3]
    layout = random_layout(rng, block_size, sizes, sum(sizes) + 5, loyalty, 0.3)
    rows = [list(head.moves(block_size)) for head in layout[2]]
    return layout[1], [row for own in rows for row in (own, NOBODY)]


def make_pool(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return all bit patterns, NaNs included."""
    integer = INTEGERS[dtype.itemsize]
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=integer)
    return bits.view(dtype)


@pytest.mark.usefixtures("on_fibres")
@pytest.mark.parametrize("loyalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        (torch.bfloat16, 128, 16),
        (torch.bfloat16, 33, 32),
        (torch.float16, 20, 16),
        (torch.float32, 5, 7),
        (torch.float64, 64, 16),
        (torch.int8, 7, 32),
        (torch.int8, 1, 1),
    ],
)
def test_tokens_arrive_and_nothing_else_changes(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    loyalty: float,
    generator: torch.Generator,
) -> None:
    rng = Random(generator.initial_seed())
    num_pages, rows = rows_of(rng, block_size, loyalty)
    pool = make_pool((num_pages, block_size, 2 * head_dim), dtype, generator)
    before, calls = pool.clone(), compact_pages.calls["cuda"]
    half = rng.randrange(2)
    check_moves(compact_pages, pool.chunk(2, dim=-1)[half], rows, loyalty < 1)
    assert compact_pages.calls["cuda"] == calls + 1
    bits = INTEGERS[dtype.itemsize]
    other = [each.view(bits).chunk(2, dim=-1)[1 - half] for each in (pool, before)]
    assert torch.equal(*other)


@pytest.mark.usefixtures("on_fibres")
def test_columns_in_slices(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "SCRATCH_BYTES", 1)
    num_pages, rows = rows_of(Random(generator.initial_seed()), 16, 0.5)
    pool = make_pool((num_pages, 16, 256), torch.bfloat16, generator)
    check_moves(compact_pages, pool[..., 128:], rows)


def far_pages(count: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return pages of one token each, so far apart that 32 bits count some of them."""
    distance = DISTANCE // 8
    slots = far_rows(count, width, torch.int8, distance)
    slots.copy_(make_pool((count, width), torch.int8, generator))
    return slots.as_strided((count, 1, width), (distance, distance, 1))


@pytest.mark.usefixtures("on_fibres")
@pytest.mark.parametrize("loyalty", [0.5, 1.0])
@pytest.mark.parametrize("width", [16, 12, 3])
def test_slots_far_apart(
    loyalty: float, width: int, generator: torch.Generator
) -> None:
    rng = Random(generator.initial_seed())
    layout = random_layout(rng, 1, [9, 6], 17, loyalty, 0.5)
    rows = [list(head.moves(1)) for head in layout[2]]
    pages = far_pages(17, width, generator)
    check_moves(compact_pages, pages, rows, loyalty < 1)


@pytest.mark.usefixtures("on_fibres")
def test_nothing_to_move() -> None:
    pages, none = torch.ones(3, 16, 8), torch.zeros(0, dtype=torch.int64)
    compact_pages(pages, none, none, torch.zeros(1, dtype=torch.int64))
    compact_pages(pages, none, none, torch.zeros(4, dtype=torch.int64))
    compact_pages(pages, none, none, torch.zeros(4, dtype=torch.int64), none.bool())
    slot = torch.zeros(3, dtype=torch.int64)
    compact_pages(pages, slot, slot, torch.tensor([0, 0, 3]), slot > 0)
    compact_pages(pages[..., :0], slot, slot, torch.tensor([0, 3]))
    assert (pages == 1).all()


@pytest.mark.usefixtures("on_fibres")
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
    compact_pages(**given)
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        compact_pages(**given | {name: wrong})


def test_the_reference_agrees_about_far_slots(generator: torch.Generator) -> None:
    """Far memory holds what is written into it."""
    layout = random_layout(Random(generator.initial_seed()), 1, [9], 10, 1.0, 0.5)
    rows = [list(layout[2][0].moves(1))]
    pages = far_pages(10, 4, generator)
    expected = pages.clone()
    compact_pages_ref(expected, *move_arguments(rows))
    check_moves(compact_pages_ref, pages, rows)
    assert torch.equal(pages, expected)


# -- page_tables -----------------------------------------------------------------------


def table_arguments(
    rows: int, columns: int, most: int, generator: torch.Generator
) -> tuple[torch.Tensor | int, ...]:
    """Return what page_tables takes, but for what it writes; slot 0 is nobody's."""

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    slots = 7
    num_global = draw(most + 1, slots)
    frontier = num_global + draw(max(columns - most, 1), slots)
    num_global[0] = frontier[0] = 0
    return (
        draw(slots, rows).long(),
        draw(10_000, rows, columns),
        draw(50_000, rows) + 16 * columns,
        draw(10_000, slots, most),
        num_global,
        frontier,
        16,
    )


@pytest.mark.usefixtures("on_fibres")
@pytest.mark.parametrize(
    ("rows", "columns", "width", "most"),
    [(1, 1, 1, 1), (3, 9, 5, 4), (5, 700, 600, 300), (4, 300, 257, 256), (2, 9, 9, 0)],
)
def test_tables_and_lengths(
    rows: int, columns: int, width: int, most: int, generator: torch.Generator
) -> None:
    given = table_arguments(rows, columns, most, generator)
    storage = torch.full((2, rows + 2, columns), POISON, dtype=torch.int32)
    lengths = torch.full((2, rows), POISON, dtype=torch.int32)
    for which, run in enumerate((page_tables, page_tables_ref)):
        run(storage[which, 1:-1, :width], lengths[which], *given)
    assert torch.equal(storage[0], storage[1]) and torch.equal(*lengths)
    assert (storage[0, 1:-1, :width] != POISON).all()
    outside = storage[0].clone()
    outside[1:-1, :width] = POISON
    assert (outside == POISON).all()


@pytest.mark.usefixtures("on_fibres")
def test_tables_far_apart(generator: torch.Generator) -> None:
    slot, table, tokens, blocks, *rest = table_arguments(4, 40, 9, generator)
    slot[:] = torch.tensor([6, 0, 3, 2])
    expected, tables = torch.zeros(4, 40, dtype=torch.int32), moved_far(table)
    lengths = torch.full((2, 4), POISON, dtype=torch.int32)
    page_tables(tables, lengths[0], slot, moved_far(table), tokens, blocks, *rest)
    page_tables_ref(expected, lengths[1], slot, table, tokens, blocks, *rest)
    assert torch.equal(tables, expected) and torch.equal(*lengths)
    page_tables(tables, lengths[0], slot, table, tokens, moved_far(blocks), *rest)
    assert torch.equal(tables, expected) and torch.equal(*lengths)


@pytest.mark.usefixtures("on_fibres")
@pytest.mark.parametrize("place", range(8))
def test_other_tables_are_refused(place: int, generator: torch.Generator) -> None:
    given = [
        torch.zeros(3, 9, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        *table_arguments(3, 9, 4, generator),
    ]
    page_tables(*given)
    other = torch.int64 if given[place].dtype == torch.int32 else torch.int32
    for wrong in (given[place].to(other), given[place][..., :0], given[place][None]):
        if wrong.shape[-1] == 0 and wrong.dim() == 2:
            continue  # fewer columns are no mistake
        with pytest.raises(RuntimeError, match="expected"):
            page_tables(*given[:place], wrong, *given[place + 1 :])
