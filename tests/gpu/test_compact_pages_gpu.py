"""Moving tokens on a GPU: both twins against the reference on a CPU, bit for bit.

Pools beyond 2^31 numbers and poisoned scratch are in benchmarks.gpu.check.kernels.

`python setup.py build_ext --inplace` builds the twin in CUDA C++ in a checkout.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced
from support.twins_of_moves import make_pool, rows_of
from support.worker.page_moves import INTEGERS, Rows, move_arguments
from vllm_kvpolicy.kernels.compact_pages import compact_pages, compact_pages_ref
from vllm_kvpolicy.kernels.libraries import CUDA

GPU = torch.device("cuda", 0)
SHAPES = (
    (torch.bfloat16, 128),
    (torch.bfloat16, 80),
    (torch.bfloat16, 33),
    (torch.float16, 20),
    (torch.float32, 256),
    (torch.float32, 5),
    (torch.float64, 64),
    (torch.uint8, 7),
)
Twin = Callable[..., None]


@pytest.fixture(params=["triton", "cuda"])
def twin(request: pytest.FixtureRequest) -> Twin:
    """compact_pages, forced to one implementation."""
    if request.param == "cuda":
        try:
            CUDA.load()
        except ImportError as error:
            pytest.skip(str(error))

    def run(*args: torch.Tensor | None) -> None:
        calls = compact_pages.calls[request.param]
        with forced(request.param):
            compact_pages(*args)
        assert compact_pages.calls[request.param] == calls + 1

    return run


def check_twin(
    twin: Twin, cache: torch.Tensor, half: int, rows: Rows, give_in_place: bool
) -> None:
    """Compare a pool of which one half of the columns was moved, with the reference."""
    head_dim = cache.shape[-1] // 2
    *arguments, in_place = move_arguments(rows)
    arguments.append(in_place if give_in_place else None)
    on_gpu = [None if part is None else part.to(GPU) for part in arguments]
    moved = cache.to(GPU)
    twin(moved.split(head_dim, dim=-1)[half], *on_gpu)
    compact_pages_ref(cache.split(head_dim, dim=-1)[half], *arguments)
    bits = INTEGERS[cache.element_size()]
    assert torch.equal(moved.cpu().view(bits), cache.view(bits))


@pytest.mark.parametrize(("dtype", "head_dim"), SHAPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("loyalty", [0.0, 0.6, 0.95, 1.0])
def test_tokens_arrive_and_nothing_else_changes(
    twin: Twin, dtype: torch.dtype, head_dim: int, block_size: int, loyalty: float
) -> None:
    rng = Random(f"{dtype} {head_dim} {block_size} {loyalty}")
    sizes = [rng.randint(0, 60) for _ in range(64)]
    num_pages, rows = rows_of(rng, block_size, sizes, loyalty)
    for half in (0, 1):
        cache = make_pool((num_pages, block_size, 2 * head_dim), dtype)
        check_twin(twin, cache, half, rows, loyalty < 1)


@pytest.mark.parametrize("loyalty", [0.9, 1.0])
def test_long_rows_and_many_rows(twin: Twin, loyalty: float) -> None:
    sizes = [2500, 0, 1200, *[2] * 4096]
    num_pages, rows = rows_of(Random(7), 16, sizes, loyalty)
    cache = make_pool((num_pages, 16, 2 * 32), torch.bfloat16)
    check_twin(twin, cache, 1, rows, loyalty < 1)


def test_every_run_gives_the_same(twin: Twin) -> None:
    """A race would show now and then only."""
    num_pages, rows = rows_of(Random(8), 16, [160] * 256, 1.0)
    *arguments, _ = move_arguments(rows)
    arguments = [part.to(GPU) for part in arguments]
    before = make_pool((num_pages, 16, 64), torch.bfloat16).view(torch.int16)
    expected = before.clone()
    compact_pages_ref(expected, *(part.cpu() for part in arguments))
    before, expected = before.to(GPU), expected.to(GPU)
    for _ in range(50):
        pages = before.clone()
        twin(pages, *arguments)
        assert torch.equal(pages, expected)


def test_it_waits_for_its_own_stream_and_for_nothing_else(twin: Twin) -> None:
    num_pages, rows = rows_of(Random(11), 16, [40] * 16, 0.5)
    arguments = move_arguments(rows)
    on_gpu = [part.to(GPU) for part in arguments]
    cache = make_pool((num_pages, 16, 64), torch.bfloat16).view(torch.int16)
    source, pages = cache.to(GPU), torch.zeros_like(cache, device=GPU)
    twin(pages, *on_gpu)  # compiled before
    torch.cuda.synchronize(GPU)
    stream = torch.cuda.Stream(GPU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            pages.copy_(source)
            twin(pages, *on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(GPU)
    compact_pages_ref(cache, *arguments)
    assert torch.equal(pages.cpu(), cache)


@pytest.mark.parametrize("twin", ["cuda"], indirect=True)
def test_the_cuda_twin_refuses_lists_elsewhere(twin: Twin) -> None:
    slot = torch.zeros(2, dtype=torch.int64, device=GPU)
    pages, first = torch.zeros(1, 16, 8, device=GPU), torch.tensor([0, 2], device=GPU)
    with pytest.raises(RuntimeError, match="dest_slots: expected"):
        twin(pages, slot, slot.cpu(), first)
