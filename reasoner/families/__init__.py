"""Owns the problem families: one file each, all in the same way of writing."""

from collections.abc import Callable
from random import Random

from reasoner.families import (
    add,
    copy,
    count,
    hops,
    hot,
    mul,
    needle,
    path,
    recall,
    sub,
)
from reasoner.families.sheet import Sheet

FAMILIES: dict[str, Callable[[Random, int], Sheet]] = {
    "recall": recall.build,
    "copy": copy.build,
    "hot": hot.build,
    "sub": sub.build,
    "add": add.build,
    "mul": mul.build,
    "count": count.build,
    "path": path.build,
    "hops": hops.build,
    "needle": needle.build,
}
"""Generators by family name: each takes a source of randomness and the lines."""
