"""How far tests sweep: `make test` over covering sets, `make test-all` over all.

That a scorer and an allocator go together is shown on tensors in tests/policies, where
it takes milliseconds; an engine is shown one name of each word. Tests of kernels and
engines with several parameters run often enough for each value to come once. What a
covering set leaves out finds no fault of tools/seeded_faults that it misses.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vllm_kvpolicy.policies.names import names, parse

every_name = False  # `--every-name`, set by tests/conftest.py
THINNER = 4  # times fewer random cases in `make test`
# Folders of tests/ whose products of parameters are thinned.
DEAR = ("csrc", "engine", "gpu", "interpreted", "kernels", "worker")


def trials(number: int) -> int:
    """Return how many random cases, or steps of simulations, to try of a number."""
    return number if every_name else number // THINNER


def evictions() -> list[str]:
    return [name for name in names() if not parse(name).is_test]


def covering(among: Sequence[str]) -> list[str]:
    """Return names that bring each scorer and each allocator among these once.

    A scorer comes with an allocator that has not come before where there is one, and
    alone otherwise, so that few names bring all.
    """
    if every_name:
        return list(among)
    chosen: list[str] = []
    seen: set[str] = set()
    for bringing in (2, 1):
        for name in among:
            words = {name} if "-" not in name else set(name.split("-"))
            if len(words - seen) >= bringing:
                chosen.append(name)
                seen |= words
    return [name for name in among if name in chosen]


def some(among: Sequence[Any]) -> list[Any]:
    """Return every third of values that each cost an engine, the first one first."""
    return list(among) if every_name else list(among[::3])


def paired(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return values side by side, the shorter lists again and again; or all products.

    For runs that several tests look at, which have to choose the same ones.
    """
    lists = [list(each) for each in values]
    if every_name:
        return list(product(*lists))
    longest = max(map(len, lists))
    return [tuple(each[n % len(each)] for each in lists) for n in range(longest)]


def thinned(items: Iterable[pytest.Item], tests: Path) -> list[pytest.Item]:
    """Return the items of `make test`: each value of a parameter once, where dear."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.path, item.name.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for (path, _), group in groups.items():
        folder = path.relative_to(tests).parts[0] if path.is_relative_to(tests) else ""
        if folder not in DEAR or not all(hasattr(item, "callspec") for item in group):
            kept.update(group)
            continue
        brings = {item: _values(item) for item in group}
        missing = set().union(*brings.values())
        while missing:
            best = max(group, key=lambda item: len(brings[item] & missing))
            kept.add(best)
            missing -= brings[best]
    return [item for item in items if item in kept]


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the names and values of its parameters; a tuple of them is one value."""
    params = dict(item.callspec.params)
    found = set()
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0]
        if isinstance(given, str):
            given = [name.strip() for name in given.split(",")]
        values = [params.pop(name) for name in given if name in params]
        found.add((str(given), repr(values)))
    return found | {(name, repr(value)) for name, value in params.items()}
