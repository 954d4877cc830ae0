"""Fibres find what is wrong with kernels: barriers that miss or wait for ever, rubbish.

Without this, tests of kernels on fibres might pass whatever the kernels do.
"""

import ctypes
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from support.cuda_on_fibres_library import ORDERS, STAND_INS, command_of, find_compiler

NUMBERS = list(range(64))
# Two blocks shift them three times each.
DOWN, UP = [*range(6, 64), *range(6)], [*range(58, 64), *range(58)]
(
    CORRECT,
    NO_BARRIER_BEFORE,
    NO_BARRIER_BEFORE_UP,
    NO_BARRIER_AFTER,
    UNWRITTEN,
    SOME_WAIT,
    TWO_PLACES,
) = range(7)
Run = tuple[str, list[int]]


@pytest.fixture(scope="module")
def faulty(setup: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of faulty.cpp; fails without g++."""
    folder: Path = tmp_path_factory.mktemp("faulty")
    library = folder / "faulty.so"
    sources = [str(STAND_INS / name) for name in ("faulty.cpp", "fibres.cpp")]
    command = [*command_of(setup), "-shared", "-o", str(library), *sources]
    subprocess.run([find_compiler(), *command], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run_kernel.restype = ctypes.c_char_p
    loaded.launch_of_size.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return loaded


def run(faulty: ctypes.CDLL, which: int) -> list[Run]:
    """Return, for each order of the threads, what is said and the numbers after."""
    found = []
    for order in ORDERS:
        numbers = (ctypes.c_int * 64)(*NUMBERS)
        faulty.set_order(order)
        said = faulty.run_kernel(which, numbers).decode()
        found.append((said, list(numbers)))
    return found


def test_a_kernel_without_fault(faulty: ctypes.CDLL) -> None:
    assert run(faulty, CORRECT) == [("", DOWN)] * len(ORDERS)


@pytest.mark.parametrize(
    ("which", "correct"),
    [(NO_BARRIER_BEFORE, DOWN), (NO_BARRIER_BEFORE_UP, UP), (NO_BARRIER_AFTER, DOWN)],
)
def test_a_missing_barrier_shows_in_some_order(
    faulty: ctypes.CDLL, which: int, correct: list[int]
) -> None:
    assert any(numbers != correct for _, numbers in run(faulty, which))


def test_shared_memory_holds_rubbish(faulty: ctypes.CDLL) -> None:
    for _, numbers in run(faulty, UNWRITTEN):
        assert set(numbers) == {0x5A5A5A5A}


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (SOME_WAIT, "a barrier that others never reach"),
        (TWO_PLACES, "wait at different barriers"),
    ],
)
def test_barriers_that_not_all_reach(
    faulty: ctypes.CDLL, which: int, words: str
) -> None:
    assert all(words in said for said, _ in run(faulty, which))
    assert run(faulty, CORRECT)[0] == ("", DOWN), "after a failure"


def test_launches_that_a_gpu_refuses(faulty: ctypes.CDLL) -> None:
    sizes = (1, 1, 1), (3, 65535, 1), (1, 1, 1024), (70_000, 1, 1)
    assert [faulty.launch_of_size(*size) for size in sizes] == [0] * 4
    sizes = (0, 1, 1), (1, 65536, 1), (1, 1, 1025), (1, 1, 0)
    assert all(faulty.launch_of_size(*size) != 0 for size in sizes)
