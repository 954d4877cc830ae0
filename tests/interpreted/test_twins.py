"""Every operation has its twin, with the same parameters."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

import pytest

from vllm_kvpolicy import kernels
from vllm_kvpolicy.kernels.dispatch import Operation
from vllm_kvpolicy.kernels.preferences import IMPLEMENTATIONS, has

STEMS = [module.name for module in iter_modules(kernels.__path__) if not module.ispkg]
MODULES = [import_module(f"vllm_kvpolicy.kernels.{stem}") for stem in STEMS]
OPERATIONS = {
    value.name: value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, Operation) and value.stem == module.__name__.split(".")[-1]
}


def test_there_are_operations() -> None:
    assert {"window_usage", "segment_quota", "compact_pages"} <= set(OPERATIONS)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_twin_takes_what_the_reference_takes(name: str) -> None:
    operation = OPERATIONS[name]
    twins = [each for each in IMPLEMENTATIONS if each != "reference"]
    for which in [each for each in twins if has(name, each)]:
        twin = operation.implementation(which)
        want, got = inspect.signature(operation.reference), inspect.signature(twin)
        assert list(want.parameters) == list(got.parameters)
        assert [p.default for p in want.parameters.values()] == [
            p.default for p in got.parameters.values()
        ]
        home = f"triton.{operation.stem}" if which == "triton" else which
        assert twin.__module__ == f"vllm_kvpolicy.kernels.{home}"
