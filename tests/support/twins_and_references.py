"""Compares a twin that is forced with its reference, number for number."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu.kernel_checks import forced, poisoned
from vllm_kvpolicy.kernels.dispatch import Operation


@pytest.fixture
def in_cpp() -> Iterator[None]:
    """Run operations in C++; fresh memory is poisoned."""
    with forced("cpu"), poisoned():
        yield


def run_twin(operation: Operation, *args: Any, **options: Any) -> Any:
    """Run an operation, but not its reference."""
    before = operation.calls["reference"]
    found = operation(*args, **options)
    assert operation.calls["reference"] == before, "the twin has not run"
    return found


def check_call(operation: Operation, *args: Any, **options: Any) -> Any:
    """Compare with the reference; return what the twin found."""
    found = run_twin(operation, *args, **options)
    want = operation.reference(*args, **options)
    for got, wanted in zip(_parts(found), _parts(want), strict=True):
        if wanted is None:
            assert got is None
        else:
            assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    return found


def _parts(result: Any) -> list[torch.Tensor | None]:
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result if isinstance(result, tuple) else vars(result).values())


def check_tables(
    operation: Operation, tables: list[torch.Tensor], *given: Any, last: bool = False
) -> None:
    """Compare what is written into copies of the tables, and what is returned.

    Args:
        tables: the first arguments, or the last ones.
        given: the other arguments.
    """
    results, after = [], []
    for call in (operation, operation.reference):
        mine = [table.clone() for table in tables]
        results.append(call(*given, *mine) if last else call(*mine, *given))
        after.append(mine)
    assert all(map(torch.equal, *after))
    assert not all(map(torch.equal, after[0], tables))
    got, want = results
    assert got is want is None or torch.equal(got, want)
