"""The worked examples in docstrings hold."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "events",
    "block_manager.forecast",
    "block_manager.levels",
    "block_manager.pressure",
    "kernels.assign_pages",
    "kernels.compact_pages",
    "kernels.page_tables",
    "kernels.segment_quota",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(import_module(f"vllm_kvpolicy.{name}"), optionflags=flags)
    assert result.attempted > 0 and result.failed == 0
